"""What the scripts of bench/ share: models, servers, environments, result files."""

import sys

from benchkit.paths import ROOT

sys.path.append(str(ROOT))  # for tests.*; after the installed package
