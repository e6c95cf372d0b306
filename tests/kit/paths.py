"""Where the project's files are, wherever a test stands."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
DATA = TESTS / "data"
DOCS = ROOT / "docs"
# A child needs these to import the package and this kit, and the tools.
PYTHONPATH = os.pathsep.join(str(ROOT / folder) for folder in ("src", "tests", "tools"))
