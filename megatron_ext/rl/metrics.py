"""What is measured in a run, under verl's names where verl has one, and the files that hold it.

Computed here                                                                             from
  prompt_length/, response_length/{mean,max,min,clip_ratio}                               sequence_metrics
  critic/score/, critic/rewards/, critic/advantages/{mean,max,min}, critic/score/<function>/mean   reward_metrics
  val-core/<source>/acc/mean@1, val-aux/<source>/{reward,<function>}/mean@1                validation_metrics
  actor/{pg_loss,pg_clipfrac,ppo_kl,kl_loss,kl_coef}                                      actor_metrics
  training/rollout_*, rollout_corr/*                                                      logdiff_metrics
  timing_s/<phase>, perf/{total_num_tokens,time_per_step,throughput}                      timing_metrics
Passed through by the loop: actor/{grad_norm,lr}, training/global_step. Ours alone: training/rollout_logprobs_diff_{max,mean},
training/rollout_logprobs_mismatched_tokens, training/sampled_tokens, actor/{loss,skipped_updates}, critic/score/<function>/mean.

Every sum is exact before its one rounding, and exp is our own (libm and numpy differ by CPU), so that a metric depends neither
on the order of the responses nor on the machine.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

METRICS_FILE = "metrics.jsonl"
TIMING_FILE = "timing.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
MACHINE_DEPENDENT = ("timing_s/", "timing_per_token_ms/", "perf/")
ACCURACY = "acc"
CHI2_BOUND = 20.0  # verl's clamp of log ratios before they are squared
LN2 = math.log(2.0)
LN2_HIGH, LN2_LOW = float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33")  # n * LN2_HIGH is exact for |n| < 2**20
EXP_TAIL = [1.0 / math.factorial(k + 2) for k in range(13)]


def sequence_metrics(prompt_lens: Sequence[int], response_lens: Sequence[int], max_prompt_len: int, max_response_len: int) -> dict[str, float]:
    """Lengths in tokens, one per sequence; clip_ratio: share of sequences exactly as long as allowed. ValueError if one is longer."""
    found = {}
    for name, lengths, longest in (("prompt_length", prompt_lens, max_prompt_len), ("response_length", response_lens, max_response_len)):
        values = _flat(lengths, name)
        if values.max() > longest:
            raise ValueError(f"{name}: {int(values.max())} tokens, at most {longest} were allowed")
        found |= _mean_max_min(name, values)
        found[f"{name}/clip_ratio"] = float(np.count_nonzero(values == longest)) / len(values)
    return found


def reward_metrics(scores_by_function: Mapping[str, Sequence[float]], totals: Sequence[float], advantages: Sequence,
                   rewards: Sequence[float] | None = None) -> dict[str, float]:  # fmt: skip
    """One score and one total per response; advantages: per response one number, or an array with one per token, which is verl's mean.

    rewards: totals less a KL penalty, where there is one; else the totals. ValueError if lengths differ or nothing was scored.
    """
    rewards = totals if rewards is None else rewards
    columns = {f"score of {name}": column for name, column in scores_by_function.items()} | {"rewards": rewards, "advantages": advantages}
    for name, column in columns.items():
        if len(column) != len(totals):
            raise ValueError(f"{name}: {len(column)} values for {len(totals)} responses")
    found = _mean_max_min("critic/score", _flat(totals, "totals")) | _mean_max_min("critic/rewards", _flat(rewards, "rewards"))
    found |= _mean_max_min("critic/advantages", _flat(np.concatenate([np.atleast_1d(a) for a in advantages]), "advantages"))
    return found | {f"critic/score/{name}/mean": _mean(_flat(column, name)) for name, column in scores_by_function.items()}


def validation_metrics(sources: Sequence[str], scores_by_function: Mapping[str, Sequence[float]], totals: Sequence[float]) -> dict[str, float]:
    """Means over the held-out responses of each data source, one response per prompt.

    The first reward function is the accuracy (verl's core variable "acc"); the others and the weighted total go to val-aux.
    """
    names = list(scores_by_function)
    columns = {f"val-core/{{}}/{ACCURACY}/mean@1": scores_by_function[names[0]]}
    columns |= {f"val-aux/{{}}/{name}/mean@1": scores_by_function[name] for name in names[1:]} | {"val-aux/{}/reward/mean@1": totals}
    found = {}
    for source in sorted(set(sources)):
        mine = [index for index, name in enumerate(sources) if name == source]
        found |= {key.format(source): _mean(_flat([column[i] for i in mine], source)) for key, column in columns.items()}
    return found


def actor_metrics(
    new: Sequence[np.ndarray], old: Sequence[np.ndarray], advantages: Sequence[float], objective, aggregation: str,
    reference: Sequence[np.ndarray] | None = None,
) -> dict[str, float]:  # fmt: skip
    """Of the logprobs per response that the updates saw (new), those that sampled (old) and those of the reference policy, all float32.

    objective, aggregation: as megatron_ext.ops.loss has them. pg_loss: without the KL term; pg_clipfrac: share of tokens whose clipped loss is
    the larger one; ppo_kl = mean(old - new); kl_loss: of r - log r - 1, r = reference / new probability, aggregated as the loss.
    """
    n, o = (np.concatenate([*side]).astype(np.float64) for side in (new, old))
    lengths = [len(part) for part in new]
    logs = n - o
    if objective.importance_level == "sequence":
        logs = np.repeat([_mean(part) for part in np.split(logs, np.cumsum(lengths)[:-1])], lengths)
    ratio, advantage = exp(logs), np.repeat(np.asarray(advantages, dtype=np.float64), lengths)
    plain, clipped = -advantage * ratio, -advantage * np.clip(ratio, 1.0 - objective.clip_low, 1.0 + objective.clip_high)
    found = {
        "actor/pg_loss": _aggregate(np.maximum(plain, clipped), lengths, aggregation),
        "actor/pg_clipfrac": float(np.count_nonzero(clipped > plain)) / len(n),
        "actor/ppo_kl": _mean(o - n),
    }
    if reference is not None:
        kl = _k3(np.concatenate([*reference]).astype(np.float64) - n)
        found |= {"actor/kl_loss": _aggregate(kl, lengths, aggregation), "actor/kl_coef": objective.kl_coef}
    return found


def _aggregate(terms: np.ndarray, lengths: Sequence[int], aggregation: str) -> float:
    """The mean over all tokens, or over responses of the mean over their tokens."""
    if aggregation == "token-mean":
        return _mean(terms)
    return _mean(np.array([_mean(part) for part in np.split(terms, np.cumsum(lengths)[:-1])]))


def logdiff_metrics(train: Sequence[np.ndarray], rollout: Sequence[np.ndarray]) -> dict[str, float]:
    """Every training/rollout_* and rollout_corr/* metric of float32 logprobs per response, from both sides.

    With t, r the logprobs of one token, d = t - r, p = exp(t), q = exp(r), all in float64:
      rollout_logprobs_diff_{max,mean}     of |d|               rollout_logprobs_mismatched_tokens   tokens whose bits differ
      rollout_probs_diff_{max,mean,std}    of |p - q|; std with n - 1, and 0 for a single token (verl: NaN)
      rollout_actor_probs_pearson_corr     of p and q; 1 where all p equal q, also if constant; else 0 where either is constant (verl: NaN)
      rollout_probs_diff_valid             1; where verl would say 0, nothing was sampled and a ValueError says so
      kl = mean(-d)    k3_kl = mean(exp(d) - d - 1)    chi2_token = mean(exp(2 d)) - 1, d held within +-20
    and per response, with T, R its mean t, r, averaged over the responses that have tokens:
      training_log_ppl = mean(-T)    training_ppl = mean(exp(-T))    rollout_log_ppl, rollout_ppl: the same of R
      log_ppl_diff{,_max,_min} of R - T    log_ppl_abs_diff = mean|R - T|    ppl_ratio = mean(exp(R - T))
      chi2_seq = mean(exp(2 sum d)) - 1, the sum held within +-20
    verl computes in float32 and adds 1e-8 to token counts: its last digits differ. Raises ValueError naming the response if lengths
    or dtypes differ or a logprob is not finite.
    """
    _check_logprobs(train, rollout)
    t, r = (np.concatenate([*side]).astype(np.float64) for side in (train, rollout))
    mismatched = np.count_nonzero(np.concatenate([*train]).view(np.int32) != np.concatenate([*rollout]).view(np.int32))
    p, q = exp(t), exp(r)
    logprobs_diff, probs_diff = np.abs(t - r), np.abs(p - q)
    tokenwise = {
        "training/rollout_logprobs_diff_max": float(logprobs_diff.max()),
        "training/rollout_logprobs_diff_mean": _mean(logprobs_diff),
        "training/rollout_logprobs_mismatched_tokens": int(mismatched),
        "training/rollout_probs_diff_valid": 1,
        "training/rollout_probs_diff_max": float(probs_diff.max()),
        "training/rollout_probs_diff_mean": _mean(probs_diff),
        "training/rollout_probs_diff_std": _std(probs_diff),
        "training/rollout_actor_probs_pearson_corr": _pearson(p, q),
        "rollout_corr/kl": _mean(r - t),
        "rollout_corr/k3_kl": _mean(_k3(t - r)),
        "rollout_corr/chi2_token": _mean(exp(2.0 * np.clip(t - r, -CHI2_BOUND, CHI2_BOUND))) - 1.0,
    }
    return tokenwise | _perplexity_metrics(train, rollout)


def _perplexity_metrics(train: Sequence[np.ndarray], rollout: Sequence[np.ndarray]) -> dict[str, float]:
    pairs = [(a.astype(np.float64), b.astype(np.float64)) for a, b in zip(train, rollout, strict=True) if len(a)]
    t = np.array([_mean(a) for a, _ in pairs])
    r = np.array([_mean(b) for _, b in pairs])
    ratio_logs = np.array([math.fsum(a - b) for a, b in pairs])
    named = {
        "training_log_ppl": _mean(-t), "training_ppl": _mean(exp(-t)), "rollout_log_ppl": _mean(-r), "rollout_ppl": _mean(exp(-r)),
        "log_ppl_diff": _mean(r - t), "log_ppl_diff_max": float((r - t).max()), "log_ppl_diff_min": float((r - t).min()),
        "log_ppl_abs_diff": _mean(np.abs(r - t)), "ppl_ratio": _mean(exp(r - t)),
        "chi2_seq": _mean(exp(2.0 * np.clip(ratio_logs, -CHI2_BOUND, CHI2_BOUND))) - 1.0,
    }  # fmt: skip
    return {f"rollout_corr/{name}": value for name, value in named.items()}


def timing_metrics(seconds: Mapping[str, float], tokens: int, devices: int = 1) -> dict[str, float]:
    """seconds: per phase, with the whole step as "step"; tokens: prompts and responses. Throughput in tokens per second per device."""
    if not seconds.get("step", 0.0) > 0.0:
        raise ValueError(f"timing needs the seconds of the whole step as 'step' > 0, found {dict(seconds)}")
    step = float(seconds["step"])
    perf = {"perf/total_num_tokens": int(tokens), "perf/time_per_step": step, "perf/throughput": tokens / (step * devices)}
    return {f"timing_s/{name}": float(value) for name, value in seconds.items()} | perf


def exp(x: np.ndarray) -> np.ndarray:
    """e**x in float64 within about 1 ulp, the same bits on every machine: elementwise + - *, rounding and scaling by 2**n only."""
    n, r, tail = _exp_parts(x)
    return np.ldexp(1.0 + (r + tail), n)


def _k3(d: np.ndarray) -> np.ndarray:
    """exp(d) - d - 1, without cancellation near 0, so never negative."""
    n, _, tail = _exp_parts(d)
    return np.where(n == 0, tail, exp(d) - d - 1.0)


def _exp_parts(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """n, r, tail with x = n ln 2 + r, |r| <= ln(2)/2, and exp(r) = 1 + r + tail."""
    x = np.clip(x, -800.0, 800.0)  # beyond, the result is 0 or infinite anyway
    n = np.rint(x / LN2)
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    series = np.full_like(r, EXP_TAIL[-1])
    for coefficient in reversed(EXP_TAIL[:-1]):
        series = series * r + coefficient
    return n.astype(np.int64), r, r * r * series


def _flat(values: Sequence[float], name: str) -> np.ndarray:
    flat = np.asarray(values, dtype=np.float64)
    if flat.size == 0:
        raise ValueError(f"{name}: no value to summarise")
    return flat


def _mean(values: np.ndarray) -> float:
    """Held between the extremes, which a rounded quotient can leave: the mean of a constant is that constant."""
    return float(min(max(math.fsum(values) / len(values), values.min()), values.max()))


def _mean_max_min(name: str, values: np.ndarray) -> dict[str, float]:
    return {f"{name}/mean": _mean(values), f"{name}/max": float(values.max()), f"{name}/min": float(values.min())}


def _std(values: np.ndarray) -> float:
    return math.sqrt(math.fsum((values - _mean(values)) ** 2) / (len(values) - 1)) if len(values) > 1 else 0.0


def _pearson(a: np.ndarray, b: np.ndarray) -> float:
    if np.array_equal(a, b):
        return 1.0
    da, db = a - _mean(a), b - _mean(b)
    scale = math.sqrt(math.fsum(da * da)) * math.sqrt(math.fsum(db * db))
    return max(-1.0, min(1.0, math.fsum(da * db) / scale)) if scale else 0.0


def _check_logprobs(train: Sequence[np.ndarray], rollout: Sequence[np.ndarray]) -> None:
    if len(train) != len(rollout):
        raise ValueError(f"{len(train)} training and {len(rollout)} rollout sequences")
    for i, (a, b) in enumerate(zip(train, rollout, strict=True)):
        if len(a) != len(b):
            raise ValueError(f"response {i}: {len(a)} training logprobs, {len(b)} rollout logprobs")
        for side, values in (("training", a), ("rollout", b)):
            if values.dtype != np.float32:
                raise ValueError(f"response {i}: {side} logprobs must be float32, found {values.dtype}")
            wrong = np.flatnonzero(~np.isfinite(values))
            if wrong.size:
                raise ValueError(f"response {i}: {side} logprob at position {wrong[0]} is {values[wrong[0]]}")
    if not sum(map(len, train)):
        raise ValueError("no sampled token to compare")


class MetricsWriter:
    """One line per step in metrics.jsonl and timing.jsonl, the same numbers in TensorBoard, and in W&B where a project is named.

    metrics.jsonl holds functions of the run alone, so equal runs write equal bytes; times and counters that depend on the machine go to
    timing.jsonl. Steps are consecutive, from 0 or 1. A folder that already has lines needs rewind() before log(). W&B gets one run per
    process, grouped by the folder's name. Raises ModuleNotFoundError at once where a package that was asked for is not installed.
    """

    def __init__(self, out_dir: str | os.PathLike, tensorboard: bool = True, wandb_project: str | None = None) -> None:
        self.out_dir = pathlib.Path(out_dir)
        self.out_dir.mkdir(parents=True, exist_ok=True)
        self._summary_writer = _summary_writer_class() if tensorboard else None
        self._tensorboard, self._purge_step = None, None
        self._wandb = _start_wandb(wandb_project, self.out_dir) if wandb_project else None
        self._paths = [self.out_dir / METRICS_FILE, self.out_dir / TIMING_FILE]
        self._files = [open(path, "ab") for path in self._paths]
        self._last: int | None = None
        self._used = any(path.stat().st_size for path in self._paths)

    def log(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float]) -> None:
        """On disk when it returns. Raises ValueError, before anything is written, naming a metric that is not finite or in the wrong file."""
        self._check_step(step)
        lines = [_line(step, metrics), _line(step, timing)]
        _check_places(metrics, timing, step)
        for file, line in zip(self._files, lines, strict=True):
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._last = step
        self._publish(step, {**metrics, **timing})

    def rewind(self, step: int) -> None:
        """Forgets what came after `step`, the step of the checkpoint that the run resumes from; 0 starts over.

        Raises ValueError naming the file, and changes neither, if a line up to `step` is missing.
        """
        kept = [_lines_up_to(path, step) for path in self._paths]
        for i, (path, lines) in enumerate(zip(self._paths, kept, strict=True)):
            self._files[i].close()
            replace_file(path, b"".join(lines))
            self._files[i] = open(path, "ab")
        self._last, self._used = (step if kept[0] else None), False
        self._purge_step = step + 1
        self._close_tensorboard()

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._close_tensorboard()
        if self._wandb:
            self._wandb.finish()
            self._wandb = None

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _check_step(self, step: int) -> None:
        if self._used:
            raise ValueError(f"{self.out_dir.name} already holds steps of a run: rewind() to its checkpoint, or use another folder")
        expected = (0, 1) if self._last is None else (self._last + 1,)
        if step not in expected:
            raise ValueError(f"step {step} logged where step {' or '.join(map(str, expected))} is due")

    def _publish(self, step: int, values: Mapping[str, float]) -> None:
        if self._summary_writer:
            if self._tensorboard is None:
                folder = str(self.out_dir / TENSORBOARD_FOLDER)
                self._tensorboard = self._summary_writer(folder, purge_step=self._purge_step)
            for name in sorted(values):
                self._tensorboard.add_scalar(name, float(values[name]), step)
            self._tensorboard.flush()
        if self._wandb:
            self._wandb.log({name: _plain(value) for name, value in values.items()}, step=step)

    def _close_tensorboard(self) -> None:
        if self._tensorboard:
            self._tensorboard.close()
            self._tensorboard = None


def read_metrics(path: str | os.PathLike) -> list[dict]:
    """The lines of a metrics.jsonl or timing.jsonl, {"step": n, name: value}; a partly written last line is left out.

    Raises ValueError naming the file and line where one is not JSON.
    """
    path = pathlib.Path(path)
    return [_parse(path, number, line) for number, line in enumerate(_whole_lines(path), start=1)]


def replace_file(path: pathlib.Path, content: bytes) -> None:
    """Readers see the old bytes or the new ones, never a part, also after a crash."""
    partial = path.with_name(f"{path.name}.partial")
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name itself
    finally:
        os.close(folder)


def _whole_lines(path: pathlib.Path) -> list[bytes]:
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def _parse(path: pathlib.Path, number: int, line: bytes) -> dict:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path.name}, line {number}: not JSON ({error})") from None


def _lines_up_to(path: pathlib.Path, step: int) -> list[bytes]:
    lines = _whole_lines(path)
    steps = [_parse(path, number, line)["step"] for number, line in enumerate(lines, start=1)]
    kept = [s for s in steps if s <= step]
    first = min([1, *kept])
    if kept != list(range(first, step + 1)) or steps[: len(kept)] != kept:
        missing = sorted(set(range(first, step + 1)) - set(kept))
        what = f"steps {missing} are missing" if missing else "its steps are not consecutive"
        raise ValueError(f"{path.name}: {what}, so the run cannot resume after step {step}; resume from an earlier checkpoint")
    return lines[: len(kept)]


def _line(step: int, values: Mapping[str, float]) -> bytes:
    record = {"step": int(step)}
    for name, value in values.items():
        if name == "step":
            raise ValueError(f"step {step}: 'step' is the key of the step itself, not a metric")
        record[name] = _plain(value)
        if not isinstance(record[name], (int, float)) or isinstance(record[name], bool):
            raise ValueError(f"step {step}: metric {name} must be a number, found {value!r}")
        if not math.isfinite(record[name]):
            raise ValueError(f"step {step}: metric {name} is {record[name]}")
    return (json.dumps(record, sort_keys=True, allow_nan=False) + "\n").encode()


def _plain(value: object) -> object:
    return value.item() if isinstance(value, np.generic) else value


def _check_places(metrics: Iterable[str], timing: Iterable[str], step: int) -> None:
    misplaced = sorted(name for name in metrics if name.startswith(MACHINE_DEPENDENT) or name in timing)
    if misplaced:
        raise ValueError(f"step {step}: {misplaced} depend on the machine and belong to {TIMING_FILE} alone, not {METRICS_FILE}")


def _summary_writer_class() -> type:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"TensorBoard files were asked for, but the package {error.name} is not installed: install it, or turn TensorBoard off",
            name=error.name,
        ) from None
    return SummaryWriter


def _start_wandb(project: str, out_dir: pathlib.Path):
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"W&B project {project!r} was asked for, but the package {error.name} is not installed: install it, or name no W&B project",
            name=error.name,
        ) from None
    return wandb.init(project=project, name=out_dir.name, group=out_dir.name, dir=str(out_dir))
