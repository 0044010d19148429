"""What the scripts of bench/ share: running both sides, parsing, statistics, writing results."""

from benchkit.paths import ensure_driver

ensure_driver()  # parts of the package are used here, installed or not
