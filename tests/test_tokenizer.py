"""The run's tokenizer: Hugging Face's or SentencePiece's, and ids that never pass through text."""

import io
import json
import pydoc_data.topics

import numpy as np
import pytest

from megatron_ext.parity.prompts import made_prompts
from megatron_ext.rl.data import Prompt, read_prompts
from megatron_ext.rl.sampling import Response
from megatron_ext.rollout.engine import Rollout
from megatron_ext.tokenizer import SentencePieceTokenizer, TokenizerError, fingerprint, load_tokenizer

TEXT = "The for statement is used to iterate over the elements of a sequence."


@pytest.fixture(scope="module")
def sentencepiece_file(tmp_path_factory):
    """A SentencePiece BPE of 400 pieces with byte fallback; 1 and 2 are begin and end of sequence."""
    import sentencepiece

    model, topics = io.BytesIO(), pydoc_data.topics.topics
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(topics[name] for name in sorted(topics)), model_writer=model, vocab_size=400, model_type="bpe", byte_fallback=True,
        minloglevel=2, character_coverage=1.0,
    )  # fmt: skip
    file = tmp_path_factory.mktemp("sentencepiece") / "tokenizer.model"
    file.write_bytes(model.getvalue())
    return file


@pytest.fixture(scope="module")
def huggingface_folder(tmp_path_factory):
    """The same size, as Hugging Face keeps it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(pydoc_data.topics.topics.values(), trainer)
    folder = tmp_path_factory.mktemp("huggingface")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    return folder


@pytest.fixture(params=["sentencepiece", "huggingface"])
def path(request, sentencepiece_file, huggingface_folder):
    return sentencepiece_file if request.param == "sentencepiece" else huggingface_folder


def test_text_to_ids_and_back(path):
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert len(TEXT) > len(ids) > 10 and all(type(token) is int for token in ids) and tokenizer.decode(ids) == TEXT
    ended = [*ids, tokenizer.eos_token_id]
    assert tokenizer.decode(ended, skip_special_tokens=True) == TEXT != tokenizer.decode(ended, skip_special_tokens=False)


def test_both_make_prompts(path, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": TEXT}) + "\n" + json.dumps({"prompt_token_ids": [9, 8, 7]}) + "\n")
    first, second = read_prompts(file, str(path), 400, 512)
    assert list(first.ids) == load_tokenizer(path).encode(TEXT, add_special_tokens=False) and second.ids == (9, 8, 7)
    assert [len(prompt) for prompt in made_prompts(str(path), [1, 7, 130])] == [1, 7, 130]


def test_a_folder_with_a_sentencepiece_model_alone(sentencepiece_file):
    assert isinstance(load_tokenizer(sentencepiece_file.parent), SentencePieceTokenizer)


def test_sampled_ids_go_to_training_as_ids(path):
    """Ids whose text would be tokenised in another way, or that have no text at all."""
    tokenizer = load_tokenizer(path)
    split = [token for letter in "sequence" for token in tokenizer.encode(letter, add_special_tokens=False)]
    sampled = [*split, 399, tokenizer.eos_token_id, 5000]  # 5000: a padded row of the model, beyond the tokenizer
    assert tokenizer.encode(tokenizer.decode(sampled, skip_special_tokens=True), add_special_tokens=False) != sampled
    prompt = Prompt(0, tuple(split[::-1]), "unused", {})
    response = Response(prompt, 0, Rollout(list(prompt.ids), sampled, np.zeros(len(sampled), np.float32), "stop", 0, 0))
    assert response.for_training(1.0, response.logprobs, None)["tokens"] == [*prompt.ids, *sampled]
    sample = response.for_reward(1, tokenizer)
    assert sample.response_ids == tuple(sampled) and "sequence" in sample.response.replace(" ", "")


def test_what_is_no_tokenizer_is_named(tmp_path, sentencepiece_file):
    with pytest.raises(TokenizerError, match="no tokenizer; expected one of tokenizer.json"):
        load_tokenizer(tmp_path)
    broken = tmp_path / "broken.model"
    broken.write_bytes(sentencepiece_file.read_bytes()[:500])
    with pytest.raises(TokenizerError, match="broken.model: no SentencePiece model"):
        load_tokenizer(broken)
    with pytest.raises(TokenizerError, match="absent.model"):
        load_tokenizer(tmp_path / "absent.model")


def test_a_run_of_another_tokenizer_is_another_run(sentencepiece_file, huggingface_folder, tmp_path):
    from megatron_ext.rl.main import parse

    prompts = tmp_path / "p.jsonl"
    prompts.write_text("{}\n")
    required = ["--hf", "model", "--prompts", str(prompts), "--reward", "m:f", "--steps", "3", "--out", "run"]
    found = [parse([*required, *more]).identity()["tokenizer_sha256"] for more in ([], ["--tokenizer", str(sentencepiece_file)])]
    assert found == [None, fingerprint(sentencepiece_file)] and fingerprint(huggingface_folder) != found[1]
