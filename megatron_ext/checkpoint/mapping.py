"""Which rectangle of which Hugging Face tensor lies where in Megatron's tensors, for Qwen3 and Qwen3-MoE. Said once, here.

Megatron's names are those of its torch_dist checkpoints with one entry per layer (content_metadata: non_homogeneous_layers).
Legend of shapes: H hidden, I MLP width, E experts, V vocabulary, D head size, G query groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ext.checkpoint.hf_config import expert_layers, is_moe

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True)
class ModelShape:
    """What fixes names and shapes. experts_in: for every layer, whether it has experts."""

    hidden: int
    heads: int
    groups: int
    head_dim: int
    dense_width: int
    experts: int
    expert_width: int
    vocab: int
    tied: bool
    experts_in: tuple[bool, ...]

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelShape:
        """From a configuration that `hf_config.flags_from_hf` accepts."""
        heads, moe = hf["num_attention_heads"], is_moe(hf)
        return cls(
            hidden=hf["hidden_size"], heads=heads, groups=hf["num_key_value_heads"], head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
            dense_width=hf["intermediate_size"], experts=(hf.get("num_experts") or hf["num_local_experts"]) if moe else 0,
            expert_width=hf["moe_intermediate_size"] if moe else 0, vocab=hf["vocab_size"], tied=bool(hf.get("tie_word_embeddings")),
            experts_in=tuple(expert_layers(hf)),
        )  # fmt: skip

    @property
    def layers(self) -> int:
        return len(self.experts_in)

    @property
    def queries(self) -> int:
        """Rows of the queries of one group."""
        return self.heads // self.groups * self.head_dim


@dataclass(frozen=True)
class Piece:
    """A rectangle of the Hugging Face tensor `name`: `shape` at `offsets`. It lies at `at` in a Megatron tensor, whose leading
    dimensions (experts) it has not: there it takes one index."""

    name: str
    logical_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    at: tuple[int, ...]


@dataclass(frozen=True)
class MegatronTensor:
    """A tensor of a Megatron checkpoint.

    pieces: its rectangles. cut: the dimension that tensor parallelism (of experts: expert tensor parallelism) cuts, None for replicas.
    gated: gate and up halves of that dimension are cut apart. layer: from 0; None for embedding, final norm and head. last: lies
    on the last pipeline stage. padded: rows beyond the pieces are vocabulary padding.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    cut: int | None = None
    gated: bool = False
    layer: int | None = None
    last: bool = False
    padded: bool = False

    @property
    def per_expert(self) -> bool:
        return len(self.shape) == 3


def megatron_tensors(shape: ModelShape, padded_vocab: int | None = None) -> Iterator[MegatronTensor]:
    """Every tensor of the model, in the order of its layers. padded_vocab: rows of the vocabulary tensors (default: no padding)."""
    yield embedding(shape, padded_vocab)
    for layer in range(shape.layers):
        yield from layer_tensors(shape, layer, shape.experts_in[layer])
    yield final_norm(shape)
    if not shape.tied:
        yield head(shape, padded_vocab)


def embedding(shape: ModelShape, padded_vocab: int | None = None) -> MegatronTensor:
    return _vocabulary("embedding.word_embeddings.weight", EMBEDDING, shape, padded_vocab, last=False)


def head(shape: ModelShape, padded_vocab: int | None = None) -> MegatronTensor:
    """The output layer; of a tied model, its copy of the embedding."""
    return _vocabulary("output_layer.weight", EMBEDDING if shape.tied else HEAD, shape, padded_vocab, last=True)


def final_norm(shape: ModelShape) -> MegatronTensor:
    return whole_tensor("decoder.final_layernorm.weight", FINAL_NORM, (shape.hidden,), last=True)


def hf_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """{Hugging Face name: shape} of the whole model."""
    return {piece.name: piece.logical_shape for tensor in megatron_tensors(shape) for piece in tensor.pieces}


def overlap(piece: Piece, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[tuple[slice, ...], tuple] | None:
    """Where a piece meets a rectangle of its Megatron tensor: (slices of the logical tensor, index into the rectangle)."""
    lead = len(piece.at) - len(piece.shape)
    if any(not offset <= at < offset + size for at, offset, size in zip(piece.at[:lead], offsets, sizes, strict=False)):
        return None
    there, here = [], [at - offset for at, offset in zip(piece.at[:lead], offsets, strict=False)]
    for at, extent, origin, offset, size in zip(piece.at[lead:], piece.shape, piece.offsets, offsets[lead:], sizes[lead:], strict=True):
        low, high = max(at, offset), min(at + extent, offset + size)
        if low >= high:
            return None
        there.append(slice(origin + low - at, origin + high - at))
        here.append(slice(low - offset, high - offset))
    return tuple(there), tuple(here)


def whole_tensor(name: str, hf_name: str, size: tuple[int, ...], **where) -> MegatronTensor:
    """A tensor that is the same on both sides."""
    origin = (0,) * len(size)
    return MegatronTensor(name, size, (Piece(hf_name, size, origin, size, origin),), **where)


def _vocabulary(name: str, hf_name: str, shape: ModelShape, padded: int | None, last: bool) -> MegatronTensor:
    size = (shape.vocab, shape.hidden)
    piece = Piece(hf_name, size, (0, 0), size, (0, 0))
    return MegatronTensor(name, (padded or shape.vocab, shape.hidden), (piece,), cut=0, last=last, padded=True)


def layer_tensors(shape: ModelShape, layer: int, experts: bool) -> Iterator[MegatronTensor]:
    """The tensors of one layer, with experts or a dense MLP."""
    megatron, hf = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    attention, hf_attention = megatron + "self_attention.", hf + "self_attn."
    yield whole_tensor(attention + "linear_qkv.layer_norm_weight", hf + "input_layernorm.weight", (shape.hidden,), layer=layer)
    yield _qkv(attention + "linear_qkv.weight", hf_attention, shape, layer)
    for megatron_name, hf_name in (("q_layernorm", "q_norm"), ("k_layernorm", "k_norm")):
        yield whole_tensor(f"{attention}{megatron_name}.weight", f"{hf_attention}{hf_name}.weight", (shape.head_dim,), layer=layer)
    output = (shape.hidden, shape.heads * shape.head_dim)
    yield whole_tensor(attention + "linear_proj.weight", hf_attention + "o_proj.weight", output, cut=1, layer=layer)
    yield whole_tensor(megatron + "mlp.linear_fc1.layer_norm_weight", hf + "post_attention_layernorm.weight", (shape.hidden,), layer=layer)
    yield from (_experts if experts else _mlp)(shape, layer, megatron + "mlp.", hf + "mlp.")


def _qkv(name: str, hf: str, shape: ModelShape, layer: int) -> MegatronTensor:
    """Megatron stores query group after query group: its queries, then its key, then its value."""
    row, pieces = 0, []
    for group in range(shape.groups):
        for part, rows in (("q_proj", shape.queries), ("k_proj", shape.head_dim), ("v_proj", shape.head_dim)):
            logical = (shape.groups * rows, shape.hidden)
            pieces.append(Piece(f"{hf}{part}.weight", logical, (group * rows, 0), (rows, shape.hidden), (row, 0)))
            row += rows
    return MegatronTensor(name, (row, shape.hidden), tuple(pieces), cut=0, layer=layer)


def _gate_up(hf: str, hidden: int, width: int, lead: tuple[int, ...] = ()) -> Iterator[Piece]:
    for part, row in (("gate_proj", 0), ("up_proj", width)):
        yield Piece(f"{hf}{part}.weight", (width, hidden), (0, 0), (width, hidden), (*lead, row, 0))


def _mlp(shape: ModelShape, layer: int, megatron: str, hf: str) -> Iterator[MegatronTensor]:
    width = shape.dense_width
    pieces = tuple(_gate_up(hf, shape.hidden, width))
    yield MegatronTensor(megatron + "linear_fc1.weight", (2 * width, shape.hidden), pieces, cut=0, gated=True, layer=layer)
    yield whole_tensor(megatron + "linear_fc2.weight", hf + "down_proj.weight", (shape.hidden, width), cut=1, layer=layer)


def _experts(shape: ModelShape, layer: int, megatron: str, hf: str) -> Iterator[MegatronTensor]:
    experts, width, hidden = shape.experts, shape.expert_width, shape.hidden
    yield whole_tensor(megatron + "router.weight", hf + "gate.weight", (experts, hidden), layer=layer)
    fc1 = tuple(piece for e in range(experts) for piece in _gate_up(f"{hf}experts.{e}.", hidden, width, lead=(e,)))
    yield MegatronTensor(megatron + "experts.experts.linear_fc1.weight", (experts, 2 * width, hidden), fc1, cut=1, gated=True, layer=layer)
    size = (hidden, width)
    fc2 = tuple(Piece(f"{hf}experts.{e}.down_proj.weight", size, (0, 0), size, (e, 0, 0)) for e in range(experts))
    yield MegatronTensor(megatron + "experts.experts.linear_fc2.weight", (experts, hidden, width), fc2, cut=2, layer=layer)
