"""Reward functions: loaded by name, called with the samples of a step, and checked value by value.

A reward function takes list[Sample] and returns one finite number per sample: a list, a tuple, a one-dimensional numpy array or
torch tensor.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
import numbers
import pathlib
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

SPEC_FORM = "package.module:function or path/to/file.py:function, with =weight after it if the weight is not 1.0"
FINISH_REASONS = ("stop", "length")


class RewardError(RuntimeError):
    """A reward function that cannot be loaded, failed, or returned something that is no reward."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One response. `response` is the text of `response_ids` without special tokens; `record` the prompt's JSON object."""

    prompt_index: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    prompt: str
    response: str
    record: Mapping[str, Any]
    finish_reason: str  # "stop" or "length"
    step: int
    sample: int  # among the samples of its prompt, from 0

    def __post_init__(self) -> None:
        if self.finish_reason not in FINISH_REASONS:
            raise ValueError(f"finish_reason {self.finish_reason!r}: expected one of {FINISH_REASONS}")


@dataclasses.dataclass(frozen=True)
class RewardFunction:
    """`name` is the function's own name: the key of its scores and of its metrics."""

    name: str
    weight: float
    function: Callable[[list[Sample]], Any]


class Rewards:
    """The reward functions of a run. Made by load_rewards."""

    def __init__(self, functions: Sequence[RewardFunction]) -> None:
        self.functions = tuple(functions)

    def score(self, samples: Sequence[Sample]) -> dict[str, list[float]]:
        """By function, one score per sample, unweighted. RewardError if a function fails or returns anything else."""
        if not samples:
            raise ValueError("no samples to score")
        return {function.name: _scores(function, samples) for function in self.functions}

    def total(self, scores: Mapping[str, Sequence[float]]) -> list[float]:
        """The weighted sum over the functions, one per sample, rounded once after products that are rounded."""
        columns = [[function.weight * score for score in scores[function.name]] for function in self.functions]
        totals = [math.fsum(row) for row in zip(*columns, strict=True)]
        for number, total in enumerate(totals):
            if not math.isfinite(total):
                raise RewardError(f"the total reward of sample {number} of the batch is {total}; expected finite: use smaller weights")
        return totals


def load_rewards(specs: Sequence[str]) -> Rewards:
    """Reward functions from texts of SPEC_FORM. RewardError naming the spec: nothing given, not loadable, bad weight, equal names."""
    if not specs:
        raise RewardError(f"no reward function was given; expected at least one {SPEC_FORM}")
    functions: dict[str, RewardFunction] = {}
    for spec in specs:
        function = _load(spec)
        if function.name in functions:
            raise RewardError(f"reward {spec!r}: a function named {function.name!r} was given before; expected different names")
        functions[function.name] = function
    return Rewards(list(functions.values()))


def _load(spec: str) -> RewardFunction:
    source, _, rest = spec.rpartition(":")
    name, equals, weight = rest.partition("=")
    if not source or not name.isidentifier():
        raise RewardError(f"reward {spec!r}: expected {SPEC_FORM}")
    factor = _weight(weight, spec) if equals else 1.0
    try:
        module = _load_file(source) if source.endswith(".py") else importlib.import_module(source)
    except Exception as error:  # whatever the foreign code raises while it is imported
        raise RewardError(f"reward {spec!r}: cannot import {source} ({type(error).__name__}: {error}); expected {SPEC_FORM}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise RewardError(f"reward {spec!r}: {name!r} in {source} is {function!r}; expected a function of a list of samples")
    return RewardFunction(name, factor, function)


def _weight(text: str, spec: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise RewardError(f"reward {spec!r}: weight {text!r}; expected a finite number")
    return value


def _load_file(source: str) -> types.ModuleType:
    """The module of a file, the same one for every function of the file."""
    path = pathlib.Path(source).resolve()
    name = f"reward file {path}"  # no module can be imported under such a name
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _scores(function: RewardFunction, samples: Sequence[Sample]) -> list[float]:
    where = f"reward {function.name!r} at step {samples[0].step}"
    try:
        returned = function.function(list(samples))  # a copy: it may change the list
    except Exception as error:
        raise RewardError(f"{where} failed: {type(error).__name__}: {error}") from error
    expected = f"expected a list, tuple, array or 1-D tensor of {len(samples)} numbers, one per sample"
    if isinstance(returned, (np.ndarray, torch.Tensor)):
        if returned.ndim != 1:
            raise RewardError(f"{where} returned shape {tuple(returned.shape)}; {expected}")
        returned = returned.tolist()
    if not isinstance(returned, (list, tuple)):
        raise RewardError(f"{where} returned {type(returned).__name__}; {expected}")
    if len(returned) != len(samples):
        raise RewardError(f"{where} returned {len(returned)} values; {expected}")
    return [_finite(value, where, sample) for value, sample in zip(returned, samples, strict=True)]


def _finite(value: object, where: str, sample: Sample) -> float:
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise RewardError(f"{where}, prompt {sample.prompt_index}, sample {sample.sample}: {value!r}; expected a finite number")
    return float(value)


def exact_match(samples: list[Sample]) -> list[float]:
    """1.0 where the response is the record's "answer", else 0.0; white space around either does not count."""
    return [float(sample.response.strip() == _answer(sample)) for sample in samples]


def token_accuracy(samples: list[Sample]) -> list[float]:
    """Characters that response and "answer" share at the same place, over the length of the longer one; white space as in exact_match.

    Characters, because rewards read text: a share of tokens where one symbol is one token.
    """
    return [_share(sample.response.strip(), _answer(sample)) for sample in samples]


def _share(response: str, answer: str) -> float:
    longer = max(len(response), len(answer))
    return sum(a == b for a, b in zip(response, answer)) / longer if longer else 1.0


def _answer(sample: Sample) -> str:
    if "answer" not in sample.record:
        raise RewardError(f'prompt {sample.prompt_index} has no "answer" field, which this reward reads; it has {sorted(sample.record)}')
    answer = sample.record["answer"]
    if not isinstance(answer, str):
        raise RewardError(f'prompt {sample.prompt_index}: "answer" must be text, found {answer!r}')
    return answer.strip()
