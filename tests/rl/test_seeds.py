"""Request seeds: fixed for good, different wherever anything differs."""

import itertools

from megatron_ext.rl.seeds import request_seed


def test_seeds_are_fixed():
    """A change of these numbers would change every resumed run."""
    assert [request_seed(0, 1, 0, 0), request_seed(7, 12, 345, 6)] == [6929971993531640619, 6195692880825964245]


def test_seeds_differ():
    keys = list(itertools.product(range(3), (-1, 1, 11, 111), range(12), range(12)))
    seeds = {request_seed(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 1 << 63 for seed in seeds)
