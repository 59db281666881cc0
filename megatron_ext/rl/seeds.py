"""The seed of every request, from what it is and not from when or where it is served."""

from __future__ import annotations

import hashlib


def request_seed(run_seed: int, step: int, prompt: int, sample: int) -> int:
    """63 bits from (run seed, step, index of the prompt in its file, sample): neither batching nor the engines show."""
    text = f"{run_seed}/{step}/{prompt}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
