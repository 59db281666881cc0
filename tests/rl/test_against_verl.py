"""Advantages, losses, gradients and their metrics against verl's functions, on random ragged batches."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ext import ops
from megatron_ext.ops.loss import AGGREGATIONS
from megatron_ext.rl.advantages import group_advantages
from megatron_ext.rl.metrics import actor_metrics

HERE = Path(__file__).parent
PACKAGES = Path(sys.prefix) / "verl_for_tests"  # tests/run.sh installs it
LENGTHS = (5, 1, 9, 3)
CASES = [
    {"level": "token", "aggregation": aggregation, "kl_coef": kl, "clip_low": 0.2, "clip_high": high}
    for aggregation in AGGREGATIONS for kl, high in ((0.0, 0.2), (0.1, 0.28))
] + [{"level": "sequence", "aggregation": "seq-mean-token-mean", "kl_coef": 0.0, "clip_low": 0.2, "clip_high": 0.3}]  # fmt: skip
ADVANTAGES = [
    {"rewards": [1.0, 0.0, 0.5, 0.25, 2.0, 2.0, 2.0, 2.0, -1.0, 3.0, 0.0, 0.0], "group_size": 4, "by_std": by_std} for by_std in (True, False)
]  # fmt: skip


def ragged(seed):
    """Per sequence: logprobs, old and reference ones (fp32), and its advantage; some ratios lie outside the clip range."""
    rng = np.random.default_rng(seed)
    new = [-rng.exponential(1.0, n).astype(np.float32) for n in LENGTHS]
    old, reference = ([(x + rng.normal(0, 0.3, len(x))).astype(np.float32) for x in new] for _ in range(2))
    return new, old, reference, [1.5, -0.7, 0.3, -1.1]


def padded(parts):
    return [[*map(float, part), *[0.0] * (max(LENGTHS) - len(part))] for part in parts]


@pytest.fixture(scope="module")
def verl(tmp_path_factory):
    if not PACKAGES.exists():
        pytest.skip("verl is not installed: tests/run.sh installs tests/requirements_verl.txt")
    losses = []
    for seed, case in enumerate(CASES):
        new, old, reference, advantages = ragged(seed)
        mask = padded([np.ones(n) for n in LENGTHS])
        losses.append({**case, "logprobs": padded(new), "old": padded(old), "reference": padded(reference), "mask": mask, "advantages": advantages})
    file = tmp_path_factory.mktemp("verl") / "inputs.json"
    file.write_text(json.dumps({"advantages": ADVANTAGES, "losses": losses}))
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES), "VERL_USE_EXTERNAL_PLUGINS": "none"}
    result = subprocess.run([sys.executable, str(HERE / "verl_values.py"), str(file)], env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_advantages(verl):
    for case, expected in zip(ADVANTAGES, verl["advantages"], strict=True):
        assert group_advantages(case["rewards"], case["group_size"], case["by_std"]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: "-".join(str(v) for v in CASES[i].values()))
def test_loss_gradient_and_metrics(verl, index, native_ops):
    case, expected = CASES[index], verl["losses"][index]
    new, old, reference, advantages = ragged(index)
    objective = ops.PolicyObjective(case["clip_low"], case["clip_high"], case["kl_coef"], case["level"])
    by_token = case["aggregation"] == "token-mean"
    repeat = lambda numbers: torch.tensor(np.repeat(numbers, LENGTHS), dtype=torch.float32)  # noqa: E731
    flat = lambda parts: torch.from_numpy(np.concatenate(parts))  # noqa: E731
    weights = repeat([1.0 if by_token else 1.0 / n for n in LENGTHS])
    cu = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32)
    terms, slope = ops.policy_terms(flat(new), flat(old), repeat(advantages), weights, cu, objective, flat(reference))
    count = sum(LENGTHS) if by_token else len(LENGTHS)
    assert terms.double().sum().item() / count == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6)
    grads = [row[:n] for row, n in zip(expected["grad"], LENGTHS, strict=True)]
    assert (slope / count).tolist() == pytest.approx(np.concatenate(grads).tolist(), rel=1e-4, abs=1e-6)
    metrics = actor_metrics(new, old, advantages, objective, case["aggregation"], reference)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(expected["clipfrac"], abs=1e-6)
    assert metrics["actor/ppo_kl"] == pytest.approx(expected["ppo_kl"], rel=1e-4)
    assert metrics["actor/pg_loss"] + case["kl_coef"] * metrics["actor/kl_loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6)
    assert 0 < metrics["actor/pg_clipfrac"] < 1 or case["level"] == "sequence"
