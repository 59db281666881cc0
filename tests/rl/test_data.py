"""Prompt files are read or refused by line, and the order of prompts follows from seed and position alone."""

import collections
import json
import sys
from pathlib import Path

import pytest

from megatron_ext.parity.prompts import PromptError
from megatron_ext.rl.data import Prompt, PromptStream, read_prompts

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from make_rl_task import make_tokenizer  # noqa: E402

VOCAB = 40  # three special tokens, a to z are 3 to 28, 0 to 9 are 29 to 38, "=" is 39


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(64).save_pretrained(folder)
    return str(folder)


def write(tmp_path, text):
    path = tmp_path / "p.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_text_and_ids(tmp_path, hf_dir):
    records = [
        {"prompt": "ab0=", "answer": "x", "data_source": "map"},
        {"prompt_token_ids": [3, 39]},
        {"prompt": "text", "prompt_token_ids": [5]},
        {"prompt": [{"role": "user", "content": "a"}], "prompt_token_ids": [6]},
    ]
    path = write(tmp_path, "\n\n".join(json.dumps(record) for record in records))
    assert read_prompts(path, hf_dir, VOCAB, 4) == [
        Prompt(0, (3, 4, 29, 39), "ab0=", records[0]),
        Prompt(1, (3, 39), "a=", records[1]),
        Prompt(2, (5,), "text", records[2]),
        Prompt(3, (6,), "d", records[3]),
    ]


def test_no_special_tokens_are_added(tmp_path):
    """A tokenizer that puts a token before every text, where it is asked to."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer(64)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $0", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer.encode("a") == [0, 3]
    assert read_prompts(write(tmp_path, '{"prompt": "a"}'), str(tmp_path), VOCAB, 4)[0].ids == (3,)


def test_a_line_ends_at_a_newline_only(tmp_path, hf_dir):
    """JSON text may hold U+2028 and U+0085, which str.splitlines would take for line ends."""
    text = json.dumps({"prompt": "a=", "note": "b\u2028c\u0085d"}, ensure_ascii=False) + "\r\n"
    assert [prompt.text for prompt in read_prompts(write(tmp_path, text), hf_dir, VOCAB, 4)] == ["a="]


@pytest.mark.parametrize(("text", "message"), [
    ('{"prompt": "a"}\n\nnot json\n', r"p.jsonl:3: not JSON"),
    ('["a"]\n', r'p.jsonl:1: expected an object with "prompt"'),
    ('{"text": "a"}\n', r'p.jsonl:1: expected an object with "prompt"'),
    ('{"prompt": 7}\n', r'p.jsonl:1: "prompt" must be text, found int; apply a chat template'),
    ('{"prompt": [{"role": "user"}]}\n', r'p.jsonl:1: "prompt" must be text, found list; .* or give "prompt_token_ids"'),
    ('{"prompt": ""}\n', r'p.jsonl:1: "prompt" is empty; give it text'),
    ('{"prompt_token_ids": []}\n', r"p.jsonl:1: a prompt must be a non-empty list"),
    ('{"prompt_token_ids": "ab"}\n', r"p.jsonl:1: a prompt must be a non-empty list"),
    ('{"prompt_token_ids": [3, 4.5]}\n', r"p.jsonl:1: a prompt must be a non-empty list"),
    ('{"prompt_token_ids": [3, true]}\n', r"p.jsonl:1: a prompt must be a non-empty list"),
    ('{"prompt": "a"}\n{"prompt_token_ids": [3, 40]}\n', r"p.jsonl:2: token id 40 is outside the vocabulary of 40"),
    ('{"prompt_token_ids": [-1]}\n', r"p.jsonl:1: token id -1 is outside the vocabulary of 40"),
    ('{"prompt": "abcd="}\n', r"p.jsonl:1: the prompt has 5 tokens, at most 4 are allowed"),
    ("\n \n", r"p.jsonl: no prompts; expected one JSON object per line"),
])  # fmt: skip
def test_bad_lines_are_named(tmp_path, hf_dir, text, message):
    with pytest.raises(PromptError, match=message):
        read_prompts(write(tmp_path, text), hf_dir, VOCAB, 4)


def test_unreadable_files(tmp_path, hf_dir):
    with pytest.raises(PromptError, match=r"none.jsonl: cannot be read \(.*No such file.*\); expected a UTF-8 file"):
        read_prompts(tmp_path / "none.jsonl", hf_dir, VOCAB, 4)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(PromptError, match=r"latin.jsonl: cannot be read .*utf-8"):
        read_prompts(tmp_path / "latin.jsonl", hf_dir, VOCAB, 4)


def stream(size, seed=0):
    return PromptStream([Prompt(index, (3,), "a", {}) for index in range(size)], seed)


def taken(source, position, count):
    return [prompt.index for prompt in source.take(position, count)]


def test_an_epoch_visits_every_prompt_once():
    source = stream(12)
    epochs = [[taken(source, position, 4) for position in range(3 * epoch, 3 * epoch + 3)] for epoch in range(3)]
    assert all(sorted(sum(epoch, [])) == list(range(12)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and sum(epochs[0], []) != list(range(12))
    assert [source.epoch(position, 4) for position in (0, 2, 3, 8, 9)] == [0, 0, 1, 2, 3]


def test_a_remainder_is_dropped_and_no_batch_repeats_a_prompt():
    source = stream(10)
    batches = [taken(source, position, 4) for position in range(60)]
    assert all(len(set(batch)) == 4 for batch in batches)
    assert all(len({*first, *second}) == 8 for first, second in zip(batches[::2], batches[1::2])), "two batches are one epoch"
    visits = collections.Counter(sum(batches, []))
    assert len(visits) == 10 and min(visits.values()) > 12, "the dropped ones differ from epoch to epoch"
    assert sorted(taken(source, 5, 10)) == list(range(10))


def test_resuming_needs_only_the_position():
    once = [taken(stream(50), position, 8) for position in range(30)]
    assert taken(stream(50), 17, 8) == once[17]
    backwards = stream(50)
    assert [taken(backwards, position, 8) for position in reversed(range(30))] == once[::-1]
    assert taken(stream(50, seed=1), 0, 8) != once[0]


def test_the_order_is_this_one():
    """Written down: a run must be repeatable with later versions of Python and of this package."""
    assert [taken(stream(8, seed=42), position, 4) for position in range(4)] == [
        [7, 1, 0, 6], [3, 2, 5, 4], [7, 5, 3, 1], [2, 4, 0, 6]
    ]


def test_impossible_batches():
    with pytest.raises(ValueError, match="a batch of 9 different prompts was asked for, and there are 8; ask for fewer"):
        stream(8).take(0, 9)
    for position, count in ((-1, 4), (0, 0)):
        with pytest.raises(ValueError, match=f"batch {position} of {count} prompts: expected"):
            stream(8).take(position, count)
