"""The tokenizer of a run: Hugging Face's or SentencePiece's. It makes ids of prompts and text for rewards; training sees only ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

SENTENCEPIECE_FILE = "tokenizer.model"
_HF_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json")


class TokenizerError(ValueError):
    """There is no tokenizer, or it cannot be read."""


def load_tokenizer(path: str | Path):
    """A tokenizer with `encode(text, add_special_tokens=False)`, `decode(ids, skip_special_tokens=...)` and `eos_token_id`.

    path: a SentencePiece model (*.model), a Hugging Face folder, or a folder with a SentencePiece tokenizer.model alone. Raises
    TokenizerError.
    """
    path = Path(path)
    if path.suffix == ".model":
        return SentencePieceTokenizer(path)
    if any((path / name).exists() for name in _HF_FILES):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path)
    if (path / SENTENCEPIECE_FILE).exists():
        return SentencePieceTokenizer(path / SENTENCEPIECE_FILE)
    raise TokenizerError(f"{path}: no tokenizer; expected one of {', '.join(_HF_FILES)} or {SENTENCEPIECE_FILE} in a folder, or a *.model file")


def fingerprint(path: str | Path) -> str:
    """sha256 of the files that decide what a tokenizer does."""
    path = Path(path)
    files = [path] if path.is_file() else [path / name for name in (*_HF_FILES, SENTENCEPIECE_FILE)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files if file.exists())).hexdigest()


class SentencePieceTokenizer:
    """A SentencePiece model behind the part of Hugging Face's interface that a run uses."""

    def __init__(self, file: str | Path) -> None:
        import sentencepiece

        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(file))
        except (OSError, RuntimeError) as error:
            raise TokenizerError(f"{file}: no SentencePiece model ({error})") from error
        self.eos_token_id: int | None = self._model.eos_id() if self._model.eos_id() >= 0 else None

    def __len__(self) -> int:
        return self._model.get_piece_size()

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids; with add_special_tokens, begin and end of sequence around them."""
        return self._model.encode(text, add_bos=add_special_tokens, add_eos=add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text. Ids beyond the tokenizer's vocabulary, which a model with padded rows can sample, have no text; control symbols have
        none either where they are skipped, else they are written as their pieces."""
        parts: list[str] = []
        run: list[int] = []
        for token in ids:
            if not 0 <= token < len(self):
                continue
            if not self._model.is_control(token):
                run.append(token)
            elif not skip_special_tokens:
                parts += [self._model.decode(run), self._model.id_to_piece(token)]
                run = []
        return "".join([*parts, self._model.decode(run)])
