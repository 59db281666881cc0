"""Prompts of a run: read from JSON lines, and handed out in an order that the seed and the position alone fix."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ext.parity.prompts import PromptError, check_ids, parse_line
from megatron_ext.tokenizer import load_tokenizer


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One line of a prompt file. `record` is the whole JSON object: reward functions read their fields from it."""

    index: int  # among the prompts of the file, from 0
    ids: tuple[int, ...]
    text: str
    record: Mapping[str, Any]


def read_prompts(path: str | pathlib.Path, tokenizer_path: str, vocab_size: int, max_prompt_len: int) -> list[Prompt]:
    """One prompt per line that is not blank: JSON with "prompt" (text, encoded without special tokens) or "prompt_token_ids".

    Ids win where a line has both. Raises PromptError naming file, line, what was found and what to do.
    """
    lines = [(number, line) for number, line in enumerate(_read_text(path).split("\n"), start=1) if line.strip()]
    if not lines:
        raise PromptError(f'{path}: no prompts; expected one JSON object per line, {{"prompt": ...}} or {{"prompt_token_ids": [...]}}')
    tokenizer = load_tokenizer(tokenizer_path)
    prompts = []
    for index, (number, line) in enumerate(lines):
        where = f"{path}:{number}"
        record = parse_line(line, where)
        ids, text = _ids_and_text(record, tokenizer, where)
        check_ids(ids, vocab_size, where)
        if len(ids) > max_prompt_len:
            raise PromptError(f"{where}: the prompt has {len(ids)} tokens, at most {max_prompt_len} are allowed; shorten it or allow more")
        prompts.append(Prompt(index, tuple(ids), tokenizer.decode(ids) if text is None else text, record))
    return prompts


def _read_text(path: str | pathlib.Path) -> str:
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{path}: cannot be read ({error}); expected a UTF-8 file with one JSON object per line") from error


def _ids_and_text(record: Mapping[str, Any], tokenizer, where: str) -> tuple[Any, str | None]:
    """Token ids, not yet checked, and the text if the record has it."""
    text, ids = record.get("prompt"), record.get("prompt_token_ids")
    if ids is not None:
        return ids, text if isinstance(text, str) else None
    if not isinstance(text, str):
        raise PromptError(
            f'{where}: "prompt" must be text, found {type(text).__name__}; apply a chat template first or give "prompt_token_ids"'
        )
    if not text:
        raise PromptError(f'{where}: "prompt" is empty; give it text or remove the line')
    return tokenizer.encode(text, add_special_tokens=False), text


class PromptStream:
    """Batches of prompts without end. What a batch holds follows from seed, position and count, so a resumed run needs no state.

    A position counts batches, from 0 at the start of the run, and stays meaningful while `count` stays the same. Every epoch has an
    order of its own and is cut into whole batches; prompts left over at its end are not taken in this epoch, so no batch
    crosses into the next one and none holds a prompt twice.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        self.prompts = prompts
        self.seed = seed

    def take(self, position: int, count: int) -> list[Prompt]:
        """The batch number `position` of `count` different prompts. ValueError if there are fewer."""
        per_epoch = self._batches_per_epoch(position, count)
        order = _epoch_order(self.seed, position // per_epoch, len(self.prompts))
        start = position % per_epoch * count
        return [self.prompts[index] for index in order[start : start + count]]

    def epoch(self, position: int, count: int) -> int:
        """The epoch, from 0, that the batch belongs to."""
        return position // self._batches_per_epoch(position, count)

    def _batches_per_epoch(self, position: int, count: int) -> int:
        if position < 0 or count < 1:
            raise ValueError(f"batch {position} of {count} prompts: expected a position of 0 or more and a count of 1 or more")
        if count > len(self.prompts):
            raise ValueError(f"a batch of {count} different prompts was asked for, and there are {len(self.prompts)}; ask for fewer")
        return len(self.prompts) // count


@functools.lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, size: int) -> tuple[int, ...]:
    """A permutation of range(size): sorted by hash, which no version of Python or numpy changes."""

    def key(index: int) -> bytes:
        return hashlib.blake2b(f"{seed}:{epoch}:{index}".encode(), digest_size=16).digest()

    return tuple(sorted(range(size), key=key))
