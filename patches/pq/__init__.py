"""The patch queue: reading it, applying it, editing it, trying it on another release."""
