"""Random weights for a Qwen3 or Qwen3-MoE configuration, at its true widths, as a Hugging Face folder.

    python tools/make_random_model.py OUT --config configs/hf/qwen3_30b_a3b.json --layers 1 [--seed 0] [--dtype bf16]

Written tensor by tensor, so that the size of the model does not matter. There is no tokenizer: prompts are token ids. Every matrix keeps
the size of what it multiplies, router and head spread their choices, norm weights differ from 1 (as in tools/make_tiny_model.py).
"""

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron_ext.checkpoint.convert import DTYPES
from megatron_ext.checkpoint.hf_folder import write_config, write_safetensors
from megatron_ext.checkpoint.mapping import ModelShape, hf_shapes
from megatron_ext.checkpoint.output import whole_folder
from megatron_ext.checkpoint.slice import first_layers_config
from megatron_ext.checkpoint.tensors import TensorSpec, dtype_name, row_slabs

SPREAD = ("mlp.gate.weight", "lm_head.weight", "embed_tokens.weight")


def random_slabs(specs: dict[str, TensorSpec], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor from a generator of its own: its values depend on its name and the seed alone."""
    for name, spec in specs.items():
        generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "big"))
        for start, stop in row_slabs(spec):
            values = torch.empty((stop - start, *spec.shape[1:]))
            if len(spec.shape) == 1:
                low, high = (1.0, 2.0) if name.endswith(("q_norm.weight", "k_norm.weight")) else (0.5, 1.5)
                values.uniform_(low, high, generator=generator)
            else:
                values.normal_(0.0, (2.0 if name.endswith(SPREAD) else 1.0) / math.sqrt(spec.shape[-1]), generator=generator)
            yield name, values.to(spec.dtype)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--config", type=Path, required=True, help="a config.json of Hugging Face, e.g. of configs/hf/")
    parser.add_argument("--layers", type=int, help="only the first layers (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    config, dtype = json.loads(args.config.read_text()), DTYPES[args.dtype]
    config = first_layers_config(config, args.layers or config["num_hidden_layers"]) | {"torch_dtype": dtype_name(dtype)}
    specs = {name: TensorSpec(shape, dtype) for name, shape in hf_shapes(ModelShape.from_hf(config)).items()}
    with whole_folder(args.out, sum(spec.nbytes for spec in specs.values())) as folder:
        write_safetensors(folder, specs, random_slabs(specs, args.seed))
        write_config(folder, config)
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
