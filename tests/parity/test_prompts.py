"""Prompt files: what is wrong is named by file and line."""

import pytest

from megatron_ext.parity.prompts import PromptError, read_prompts


def write(tmp_path, text, name="p.jsonl"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_token_ids(tmp_path):
    path = write(tmp_path, '{"prompt_token_ids": [1, 2, 3]}\n\n{"prompt_token_ids": [999]}\n')
    assert read_prompts(path, "unused", 1000) == [[1, 2, 3], [999]]


@pytest.mark.parametrize(("text", "message"), [
    ('{"prompt_token_ids": [1]}\nnot json\n', r"p.jsonl:2: not JSON"),
    ('{"text": "a"}\n', r'p.jsonl:1: expected an object with "prompt"'),
    ('{"prompt_token_ids": []}\n', r"p.jsonl:1: a prompt must be a non-empty list"),
    ('{"prompt_token_ids": [1, "2"]}\n', r"p.jsonl:1: a prompt must be a non-empty list"),
    ('{"prompt_token_ids": [1000]}\n', r"p.jsonl:1: token id 1000 is outside the vocabulary of 1000"),
    ('{"prompt_token_ids": [1]}\n\nnot json\n', r"p.jsonl:3: not JSON"),  # lines as an editor counts them
    ('{"prompt_token_ids": [1, true]}\n', r"p.jsonl:1: a prompt must be a non-empty list"),
    ('{"prompt_token_ids": [5, -2]}\n', r"p.jsonl:1: token id -2 is outside"),
    ("\n", r"p.jsonl: no prompts"),
])  # fmt: skip
def test_bad_lines_are_named(tmp_path, text, message):
    with pytest.raises(PromptError, match=message):
        read_prompts(write(tmp_path, text), "unused", 1000)
