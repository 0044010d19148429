"""Chats: thinking, tools and calls of them in the text of an answer; no model is needed."""
