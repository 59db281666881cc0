"""Make a small random Qwen3-MoE (or dense Qwen3) with a real tokenizer, in Hugging Face format.

    python tools/make_tiny_model.py OUT [--dense] [--tied] [--layers 4 --hidden 256 ...]

The weights are random, but scaled so that a wrong bit shows: every layer changes the residual stream, attention prefers
some positions, the router some experts, and the distribution over tokens is neither flat nor certain. The tokenizer is a
byte-level BPE trained on the language reference that ships with Python. Its vocabulary (1000) is on purpose no multiple of
16 or 128, so that vocabulary padding is always at work.
"""

import argparse
import json
import math
import pydoc_data.topics
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer(vocab_size: int, max_positions: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of exactly `vocab_size` tokens, the three special ones included. ValueError if that is too few."""
    special = [END_OF_TEXT, TURN_START, TURN_END]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + len(special):
        raise ValueError(f"--vocab is {vocab_size}, expected at least {len(alphabet) + len(special)} (bytes and special tokens)")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    corpus = pydoc_data.topics.topics
    tokenizer.train_from_iterator((corpus[topic] for topic in sorted(corpus)), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the corpus yields {tokenizer.get_vocab_size()} tokens, expected --vocab {vocab_size}; ask for fewer")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=TURN_END, pad_token=END_OF_TEXT, additional_special_tokens=[TURN_START],
        model_max_length=max_positions, chat_template=CHAT_TEMPLATE, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def make_config(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> Qwen3Config | Qwen3MoeConfig:
    common = dict(
        vocab_size=args.vocab, hidden_size=args.hidden, num_hidden_layers=args.layers, num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads, head_dim=args.head_dim, intermediate_size=args.dense_width,
        max_position_embeddings=args.max_positions, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=args.tied, rms_norm_eps=1e-6, attention_bias=False,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None, dtype=torch.bfloat16,
    )  # fmt: skip
    if args.dense:
        return Qwen3Config(**common)
    return Qwen3MoeConfig(
        **common, num_experts=args.experts, num_experts_per_tok=args.top_k, moe_intermediate_size=args.expert_width,
        norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip


@torch.no_grad()
def spread_weights(model: torch.nn.Module, seed: int) -> None:
    """Random weights by parameter name, in a fixed order: the same seed gives the same model."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        values = torch.empty(parameter.shape, dtype=torch.float32)
        if parameter.dim() == 1:  # norm weights; q and k norms sharpen attention
            low, high = (1.0, 2.0) if name.endswith(("q_norm.weight", "k_norm.weight")) else (0.5, 1.5)
            values.uniform_(low, high, generator=generator)
        else:
            # Every matrix keeps the size of what it multiplies; router and head are larger, to spread their choices.
            gain = 2.0 if name.endswith(("mlp.gate.weight", "lm_head.weight", "embed_tokens.weight")) else 1.0
            values.normal_(0.0, gain / math.sqrt(parameter.shape[-1]), generator=generator)
        parameter.copy_(values)


def make_model(out: Path, args: argparse.Namespace) -> None:
    """Write config, bf16 safetensors, tokenizer and generation config into `out`."""
    tokenizer = make_tokenizer(args.vocab, args.max_positions)
    config = make_config(args, tokenizer)
    model = (Qwen3ForCausalLM if args.dense else Qwen3MoeForCausalLM)(config).to(torch.bfloat16)
    spread_weights(model, args.seed)
    save_folder(out, model, tokenizer)
    mark_made(out, "make_tiny_model", args)


def save_folder(out: Path, model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast) -> None:
    """A Hugging Face folder: config, weights in the model's dtype, tokenizer, generation config."""
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def mark_made(out: Path, tool: str, args: argparse.Namespace) -> None:
    """Written last: its presence tells that the folder is complete, and for which options."""
    (out / "made_by.json").write_text(json.dumps({"tool": tool, "options": _options(args)}, indent=1, sort_keys=True))


def is_made(out: Path, args: argparse.Namespace) -> bool:
    """Whether `out` already holds what exactly these options make."""
    marker = out / "made_by.json"
    return marker.exists() and json.loads(marker.read_text())["options"] == _options(args)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write (made if needed)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--expert-width", type=int, default=128)
    parser.add_argument("--dense-width", type=int, default=512, help="MLP width of a --dense model")
    parser.add_argument("--dense", action="store_true", help="Qwen3 without experts")
    parser.add_argument("--tied", action="store_true", help="one matrix for embedding and head")
    parser.add_argument("--vocab", type=int, default=1000)
    parser.add_argument("--max-positions", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def _options(args: argparse.Namespace) -> dict[str, object]:
    return {name: value for name, value in vars(args).items() if name != "out"}


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    if not is_made(args.out, args):
        make_model(args.out, args)
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
