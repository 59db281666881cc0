"""Helpers of the tests (`inputs`, `models`, `ranks`) are importable from every folder; the patch tests come first."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))


def pytest_collection_modifyitems(items) -> None:
    """A rollout engine enables the rollout side in this process for good; the patch machinery is tested in a clean one."""
    items.sort(key=lambda item: pathlib.Path(item.path).parent.name != "patches")
