"""Speculative decoding with an MTP head: draft, accept, roll back. Each in a module of its own."""
