"""Prompts: from a file, or made from text that ships with Python, in lengths that cross key tiles and prefill chunks."""

from __future__ import annotations

import json
import pathlib
import pydoc_data.topics
import random

from megatron_ext.tokenizer import load_tokenizer


class PromptError(ValueError):
    """A prompt file that cannot be used."""


def read_prompts(path: str, tokenizer_path: str, vocab_size: int) -> list[list[int]]:
    """One prompt per line: JSON with "prompt_token_ids" (list of int) or "prompt" (text), or the text itself in a .txt file.

    Raises PromptError naming file and line.
    """
    tokenizer = None
    prompts = []
    for number, line in enumerate(pathlib.Path(path).read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        record = {"prompt": line} if path.endswith(".txt") else parse_line(line, f"{path}:{number}")
        ids = record.get("prompt_token_ids")
        if ids is None:
            tokenizer = tokenizer or load_tokenizer(tokenizer_path)
            ids = tokenizer.encode(record["prompt"], add_special_tokens=False)
        check_ids(ids, vocab_size, f"{path}:{number}")
        prompts.append(ids)
    if not prompts:
        raise PromptError(f"{path}: no prompts; expected one JSON object per line")
    return prompts


def parse_line(line: str, where: str) -> dict:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(f'{where}: not JSON ({error}); expected {{"prompt": ...}} or {{"prompt_token_ids": [...]}}') from error
    if not isinstance(record, dict) or not ({"prompt", "prompt_token_ids"} & record.keys()):
        raise PromptError(f'{where}: expected an object with "prompt" or "prompt_token_ids", found {line[:80]}')
    return record


def check_ids(ids: object, vocab_size: int, where: str) -> None:
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise PromptError(f"{where}: a prompt must be a non-empty list of token ids")
    wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise PromptError(f"{where}: token id {wrong} is outside the vocabulary of {vocab_size}")


def made_prompts(tokenizer_path: str, lengths: list[int]) -> list[list[int]]:
    """Token ids of English text, one prompt per length; neighbours share a prefix, so that the prefix cache has work."""
    tokenizer = load_tokenizer(tokenizer_path)
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer.encode(text[: 12 * max(lengths) + 300 * len(lengths)], add_special_tokens=False)
    starts = [(i // 2) * 97 % max(1, len(ids) - max(lengths)) for i in range(len(lengths))]
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def random_prompts(vocab_size: int, lengths: list[int], seed: int) -> list[list[int]]:
    """Uniformly random token ids, one prompt per length."""
    generator = random.Random(seed)
    return [[generator.randrange(vocab_size) for _ in range(length)] for length in lengths]
