"""How tokens are chosen: samplers, and which drafts hold."""
