"""What the scripts of bench/ share: running both sides, parsing, statistics, writing results."""
