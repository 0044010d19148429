"""The fake driver, for tests that need no native library."""

from ..cli.conftest import fake  # noqa: F401 (a fixture)
