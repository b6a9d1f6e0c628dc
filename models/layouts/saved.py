"""Bytes that one rank keeps of one microbatch between forward and backward.

As Korthikanti et al., arXiv:2205.05198, section 4, count them: every linear layer and norm keeps
its input, dropout a mask of one byte an element; a norm's statistics are left out. Attention in HBM
keeps its softmax, that of a fused kernel a float32 log-sum-exp of each query and head instead.
With sequence parallelism inputs of column-parallel layers are kept split and gathered again in
backward, as Megatron-LM does. Legend as in `work`; a sequence of S tokens has a S x S scores.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from twinstream.models.layouts.rank_sizes import RankSizes

_FLOAT32_BYTES = 4
_MASK_BYTES = 1

Recompute = Literal["auto", "none", "selective", "mlp", "experts", "attention", "full"]
LayerPart = Literal["attention", "mlp"]


class SavedTensor(NamedTuple):
    """One tensor that is kept from forward to backward."""

    name: str
    size_bytes: int


def saved_bytes(sizes: RankSizes, recompute: Recompute) -> int:
    """Of one layer.

    A GPT layer of unfused attention, per token in units of the width h: 34 + 5 a s / h, with tensor
    parallelism 10 + (24 + 5 a s / h) / t, with sequence parallelism too (34 + 5 a s / h) / t;
    selective recompute drops 5 a s / h; full keeps 2, and 2 / t with sequence parallelism.

    >>> from twinstream.models.decoders.spec import ModelSpec
    >>> gpt = ModelSpec(name="gpt3", num_layers=96, d_model=12288, num_heads=96, num_kv_heads=96,
    ...                  head_dim=128, d_ff=49152, vocab_size=50257, mlp="gelu", norm="layer",
    ...                  positions="learned", max_positions=2048, biases=True, dropout=True)
    >>> split = RankSizes(shape=gpt, seq_len=2048, tp=8, sequence_parallel=True,
    ...                   attention_implementation="unfused")
    >>> saved_bytes(split, "selective") == 34 * 2048 * 12288 // 8
    True
    """
    parts: tuple[LayerPart, ...] = ("attention", "mlp")
    return sum(one.size_bytes for part in parts for one in saved_tensors(sizes, part, recompute))


def saved_tensors(
    sizes: RankSizes, part: LayerPart, recompute: Recompute
) -> tuple[SavedTensor, ...]:
    """What is kept of a part of one layer; part `mlp` is router and experts where there are some.

    `selective` repeats the core of attention in backward, `mlp` norms and the dense FFN up to its
    activation too (of experts nothing). `full` repeats the layer: of it only the
    input is kept, split over tp where sequence parallelism has it so, whole on each rank otherwise.
    """
    if recompute == "full":
        kept = SavedTensor("layer input", stored_hidden_bytes(sizes))
        return (kept,) if part == "attention" else ()
    if part == "attention" and recompute == "mlp":
        again = ("QKV input", "output projection input")  # of a norm and the core, run again
        return tuple(one for one in _attention(sizes) if one.name not in again)
    if part == "attention":
        return (*_attention(sizes), *(_core(sizes) if recompute in ("auto", "none") else ()))
    if sizes.shape.experts is not None:
        return tuple(_experts(sizes))
    if recompute == "mlp":
        return (SavedTensor("MLP norm input", stored_hidden_bytes(sizes)),
                *_mask(sizes, "MLP dropout mask"))  # fmt: skip
    return tuple(_mlp(sizes))


def hidden_bytes(sizes: RankSizes) -> int:
    """Of a microbatch between layers, whole: the tokens of this rank's cp slice."""
    return sizes.tokens * sizes.shape.d_model * sizes.itemsize


def stored_hidden_bytes(sizes: RankSizes) -> int:
    """Of a microbatch between layers as a rank holds it: split over tp by sequence parallelism."""
    return sizes.local_tokens * sizes.shape.d_model * sizes.itemsize


def head_saved_tensors(sizes: RankSizes) -> tuple[SavedTensor, ...]:
    """Kept while a microbatch is in the head: logits, float32 and softmax of them in one place."""
    hidden, logits = stored_hidden_bytes(sizes), sizes.tokens * sizes.vocab
    return (
        SavedTensor("final norm input", hidden),
        SavedTensor("head input", hidden),
        SavedTensor("float32 logits", logits * _FLOAT32_BYTES),
    )


def head_peak_bytes(sizes: RankSizes) -> int:
    """Most bytes of activations while the head runs: what it keeps, and logits or their gradient
    in the model's dtype beside those in float32."""
    logits = sizes.tokens * sizes.vocab * sizes.itemsize
    return sum(one.size_bytes for one in head_saved_tensors(sizes)) + logits


def _attention(sizes: RankSizes) -> Iterator[SavedTensor]:
    """All but the core's own."""
    tokens, item = sizes.tokens, sizes.itemsize
    yield SavedTensor("attention norm input", stored_hidden_bytes(sizes))
    yield _linear_input(sizes, "QKV input", sizes.local_tokens * sizes.shape.d_model)
    if sizes.shape.latent is not None:  # before and, but for what is rotated, behind their norms
        latent = sizes.shape.latent
        few = latent.q_rank + latent.kv_rank
        yield SavedTensor("latents", sizes.local_tokens * (few + latent.rope_dim) * item)
        yield _linear_input(sizes, "latents behind their norms", sizes.local_tokens * few)
    if sizes.shape.qk_norm:
        yield SavedTensor("Q and K before their norms", tokens * (sizes.d_q + sizes.d_kv) * item)
    yield SavedTensor("Q", tokens * sizes.d_q * item)
    yield SavedTensor("K", tokens * sizes.d_kv * item)
    yield SavedTensor("V", tokens * sizes.d_v * item)
    yield _linear_input(sizes, "output projection input", tokens * sizes.d_o)
    yield from _mask(sizes, "attention dropout mask")


def _core(sizes: RankSizes) -> Iterator[SavedTensor]:
    if not sizes.unfused:
        rows = sizes.tokens * sizes.heads
        yield SavedTensor("log-sum-exp", rows * _FLOAT32_BYTES)
        if sizes.casts:  # otherwise it is the output projection's input
            yield SavedTensor("attention output", sizes.tokens * sizes.d_o * sizes.itemsize)
        return
    scores = sizes.tokens * sizes.heads * sizes.seq_len
    yield SavedTensor("softmax", scores * sizes.itemsize)
    if sizes.shape.dropout:
        yield SavedTensor("softmax dropout mask", scores * _MASK_BYTES)
        yield SavedTensor("softmax after dropout", scores * sizes.itemsize)


def _mlp(sizes: RankSizes) -> Iterator[SavedTensor]:
    yield SavedTensor("MLP norm input", stored_hidden_bytes(sizes))
    yield _linear_input(sizes, "MLP input", sizes.local_tokens * sizes.shape.d_model)
    yield from _ffn(sizes, "MLP", sizes.tokens * sizes.d_ff)
    yield from _mask(sizes, "MLP dropout mask")


def _experts(sizes: RankSizes) -> Iterator[SavedTensor]:
    experts = sizes.shape.experts
    assert experts is not None
    local, rows, d = sizes.local_tokens, sizes.expert_tokens, sizes.shape.d_model
    yield SavedTensor("router norm input", stored_hidden_bytes(sizes))
    yield SavedTensor("router input", stored_hidden_bytes(sizes))
    yield SavedTensor("router probabilities", local * experts.count * _FLOAT32_BYTES)
    yield _linear_input(sizes, "dispatched tokens", rows * d)
    yield from _ffn(sizes, "experts", rows * sizes.expert_d_ff)
    # the gradient of a token's weights needs what each expert made of it
    yield SavedTensor("experts' outputs", sizes.routed_tokens * d * sizes.itemsize)
    if experts.shared_d_ff:
        if sizes.casts:
            yield _linear_input(sizes, "shared expert input", local * d)
        yield from _ffn(sizes, "shared expert", sizes.tokens * sizes.shared_d_ff)
    yield from _mask(sizes, "MLP dropout mask")


def _ffn(sizes: RankSizes, name: str, elements: int) -> Iterator[SavedTensor]:
    """What an activation reads and what the down projection reads."""
    if sizes.shape.gated:
        yield SavedTensor(f"{name} gate", elements * sizes.itemsize)
    yield SavedTensor(f"{name} up", elements * sizes.itemsize)
    yield _linear_input(sizes, f"{name} down input", elements)


def _linear_input(sizes: RankSizes, name: str, elements: int) -> SavedTensor:
    """In the dtype that is multiplied."""
    return SavedTensor(name, elements * sizes.matmul_bits // 8)


def _mask(sizes: RankSizes, name: str) -> Iterator[SavedTensor]:
    if sizes.shape.dropout:
        yield SavedTensor(name, sizes.local_tokens * sizes.shape.d_model * _MASK_BYTES)
