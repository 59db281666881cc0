"""Record the source fingerprint and signature of every patch target from the installed packages.

    python tools/record_patches.py            write megatron_ext/patches/recorded.json
    python tools/record_patches.py --check    compare only; exit 1 if anything differs

Run it after a row is added, or after an adapter was compared with a new upstream source: the recorded fingerprint is the
statement that somebody did compare.
"""

import argparse
import importlib.metadata
import json
import os
import sys

from megatron_ext.patches import table
from megatron_ext.patches.patch import RECORDED_FILE, Patch, recorded
from megatron_ext.patches.target import find_target, fingerprint, signature_text

SIDES = ("train", "rollout")


def record(row: Patch) -> dict[str, str]:
    """What is found for one row in the installed packages."""
    found = find_target(row.target)
    return {
        "side": row.side,
        "recorded_from": f"{row.distribution} {importlib.metadata.version(row.distribution).partition('+')[0]}",
        "sha256": fingerprint(row.target, found, row.distribution),
        "signature": signature_text(found),
    }


def record_all(sides: list[str]) -> tuple[dict[str, dict[str, str]], list[str]]:
    """target -> record of every row of these sides, and the rows that could not be resolved."""
    found, problems = {}, []
    for side in sides:
        for row in table.rows(side):
            try:
                found[row.target] = record(row)
            except Exception as error:  # a foreign import may fail in any way; all of them are reported
                problems.append(f"{row.target}: {type(error).__name__}: {error}")
    return found, problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file is out of date")
    parser.add_argument("--side", choices=SIDES, action="append", help="only this side's rows (the others are kept)")
    args = parser.parse_args()
    sides = args.side or list(SIDES)

    found, problems = record_all(sides)
    before = recorded()
    after = {target: entry for target, entry in before.items() if entry["side"] not in sides} | found
    for target in sorted(before.keys() | after.keys()):
        if before.get(target) != after.get(target):
            print("added  " if target not in before else "removed" if target not in after else "changed", target)
    for problem in problems:
        print("MISSING", problem, file=sys.stderr)
    if problems or (args.check and before != after):
        return 1
    if not args.check:
        partial = RECORDED_FILE.with_suffix(".partial")
        partial.write_text(json.dumps(after, indent=1, sort_keys=True) + "\n")
        os.replace(partial, RECORDED_FILE)
        print(f"{len(after)} targets recorded in {RECORDED_FILE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
