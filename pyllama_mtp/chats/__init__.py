"""Chats: how they are put to a model; thought and calls of tools, told apart from its answer."""
