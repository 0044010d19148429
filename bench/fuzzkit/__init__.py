"""Parts of bench/fuzz.py: files damaged on purpose, and what becomes of those who read them."""
