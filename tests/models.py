"""Tiny models for the tests, made by tools/make_tiny_model.py."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def make_model(folder: Path, *options: str) -> str:
    """A Hugging Face folder; `options` of tools/make_tiny_model.py."""
    subprocess.run([sys.executable, str(ROOT / "tools/make_tiny_model.py"), str(folder), *options], check=True, timeout=300, cwd=ROOT)
    return str(folder)
