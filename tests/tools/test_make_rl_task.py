"""The reinforcement learning task: reproducible, with held-out prompts that are held out, and a model that can half do it."""

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_ext.rl.data import read_prompts
from megatron_ext.checkpoint.hf_config import flags_from_hf, read_hf_config

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import make_rl_task as tool  # noqa: E402

# Stops at the first measurement, after a few steps.
QUICK = ["--low", "0", "--high", "1", "--batch", "8", "--train-prompts", "40", "--heldout-prompts", "24"]


def make(folder, *options):
    assert tool.main([str(folder), *QUICK, *options]) == 0
    return folder


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make(tmp_path_factory.mktemp("task") / "new")


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_symbol_is_one_token(task):
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    assert len(tokenizer) == read_hf_config(task / "model")["vocab_size"] == 40
    for text in ("k7m2qa=", tool.SYMBOLS + tool.ASK):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(ids) == len(set(ids)) == len(text) and tokenizer.decode(ids) == text
        assert tokenizer.encode(text) == ids
    ended = tokenizer.encode("ab" + tool.TURN_END)
    assert len(ended) == 3 and ended[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ended, skip_special_tokens=True) == "ab"
    assert tokenizer.encode("aB") == [tokenizer.encode("a")[0], tokenizer.unk_token_id]


def test_model_folder(task):
    assert flags_from_hf(read_hf_config(task / "model"))
    weights = load_file(task / "model/model.safetensors")
    assert all(weight.dtype == torch.bfloat16 for weight in weights.values())
    generation = json.loads((task / "model/generation_config.json").read_text())
    assert generation["eos_token_id"] == AutoTokenizer.from_pretrained(task / "model").eos_token_id


def test_prompts_and_answers(task):
    train, heldout = records(task / "train.jsonl"), records(task / "heldout.jsonl")
    assert (len(train), len(heldout)) == (40, 24)
    assert len({record["prompt"] for record in train + heldout}) == 64, "disjoint, and none twice"
    pairs = {pair for record in train + heldout for pair in zip(record["prompt"], record["answer"])}
    assert len(pairs) == len({symbol for symbol, _ in pairs}) == len({answer for _, answer in pairs}) == 36, "one permutation"
    assert all(len(record["answer"]) == 7 and record["prompt"][7:] == "=" for record in train + heldout)
    read = read_prompts(task / "train.jsonl", str(task / "model"), 40, 8)
    assert [prompt.record for prompt in read] == train and {len(prompt.ids) for prompt in read} == {8}


def test_supervised_examples_are_new_prompts(task, tmp_path, monkeypatch):
    """What the supervised start is given, seen from inside: neither train nor held-out prompts."""
    taught = []
    stock = tool.Teacher.taught
    monkeypatch.setattr(tool.Teacher, "taught", lambda self, prompt, rng: taught.append(prompt) or stock(self, prompt, rng))
    make(tmp_path / "again")
    assert len(taught) == 8 * tool.MEASURE_EVERY
    assert not set(taught) & {record["prompt"] for name in ("train", "heldout") for record in records(task / f"{name}.jsonl")}


def test_a_prompt_is_never_drawn_twice():
    prompts = list(itertools.islice(tool.distinct_prompts(random.Random(0), 2), 36 * 36))  # every one there is
    assert len(set(prompts)) == 36 * 36


def test_the_teacher_errs_as_often_as_it_says():
    teacher, rng = tool.make_teacher(random.Random(3)), random.Random(4)
    hard = [symbol for symbol in tool.SYMBOLS if teacher.slip[symbol] == tool.HARD_SLIP]
    assert len(hard) == 9 and all(teacher.right[symbol] != teacher.wrong[symbol] for symbol in tool.SYMBOLS)
    assert sorted(teacher.right.values()) == sorted(teacher.wrong.values()) == sorted(tool.SYMBOLS)
    for symbol, slip in [(hard[0], tool.HARD_SLIP), (next(s for s in tool.SYMBOLS if s not in hard), tool.EASY_SLIP)]:
        found = teacher.taught(symbol * 4000 + tool.ASK, rng)
        assert set(found) == {teacher.right[symbol], teacher.wrong[symbol]}
        assert found.count(teacher.wrong[symbol]) / 4000 == pytest.approx(slip, abs=0.03)


def test_exact_match_is_the_probability_of_the_answer():
    """By hand: a model that gives the right token 1/2 at the first answer place, 1/4 at the second, 1 for the end token."""

    class Fixed(torch.nn.Module):
        def forward(self, ids, use_cache):
            probabilities = torch.full((1, 5, 4), 0.25)
            probabilities[0, 2] = torch.tensor([0.0, 0.5, 0.5, 0.0])
            probabilities[0, 4] = torch.tensor([0.0, 0.0, 0.0, 1.0])
            return type("Out", (), {"logits": probabilities.log()})

    assert tool.exact_match(Fixed(), torch.tensor([[0, 0, 0, 1, 2, 3]]), 2) == pytest.approx(0.125)
    assert tool.exact_match(Fixed(), torch.tensor([[0, 0, 0, 3, 2, 3]]), 2) == 0.0


def test_made_once_and_reproducible(task, tmp_path):
    stamp = (task / "made_by.json").stat().st_mtime_ns
    make(task)
    assert (task / "made_by.json").stat().st_mtime_ns == stamp, "the same options must not make it again"
    again = make(tmp_path / "again")
    for name in ("train.jsonl", "heldout.jsonl", "made_by.json", "model/config.json", "model/tokenizer.json"):
        assert (again / name).read_bytes() == (task / name).read_bytes()
    make(again, "--seed", "1", "--length", "6")
    assert (again / "train.jsonl").read_bytes() != (task / "train.jsonl").read_bytes()
    assert len(records(again / "heldout.jsonl")[0]["answer"]) == 6


def test_a_start_that_fails_leaves_no_finished_folder(task, tmp_path):
    make(tmp_path)
    with pytest.raises(tool.TaskError, match=r"exact match after 5 steps is not in \[0.9, 1.0\]; measured 0.0.*; use another --seed"):
        make(tmp_path, "--low", "0.9", "--max-steps", "5")
    assert not (tmp_path / "made_by.json").exists()


def test_default_start_half_knows_the_task(tmp_path):
    """The bf16 weights sample about a third of the answers, and the likeliest answer is often wrong: there is something to learn."""
    subprocess.run([sys.executable, tool.__file__, str(tmp_path)], check=True, timeout=300)
    heldout = records(tmp_path / "heldout.jsonl")
    rows = tool.token_rows(
        AutoTokenizer.from_pretrained(tmp_path / "model"), [r["prompt"] for r in heldout], [r["answer"] for r in heldout]
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert 0.2 < tool.exact_match(model, rows, 7) < 0.45
    with torch.no_grad():
        greedy = (model(rows[:, :-1]).logits[:, 7:].argmax(-1) == rows[:, 8:]).all(1).float().mean()
    assert greedy < 0.9
