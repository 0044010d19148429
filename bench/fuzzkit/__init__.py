"""Parts of bench/fuzz.py: damaged files, made on purpose, and what becomes of those who read them."""
