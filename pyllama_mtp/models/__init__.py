"""Model files: what is in one, what it costs in memory, and how to make one without a download."""
