"""Helpers beside the tests are importable; kernels are compiled once and kept in build/."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
