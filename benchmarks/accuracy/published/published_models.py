"""Shapes of the models that the tables name, from the files that the runs were started with."""

from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.options import Experts
from twinstream.models.presets import load_model

_PRESETS = ("qwen3-30b-a3b", "qwen3-235b-a22b", "gpt-oss-120b", "deepseek-v3", "kimi-k2")
_GPT_VOCAB = 51200
_MPT_VOCAB = 50368
# Layers, width, heads; NVIDIA/dgxc-benchmarking and mosaicml/llm-foundry, recipes' files.
_MPT = {
    "mpt-125m": (12, 768, 12),
    "mpt-350m": (24, 1024, 16),
    "mpt-760m": (24, 1536, 12),
    "mpt-1b": (24, 2048, 16),
    "mpt-3b": (32, 2560, 20),
    "mpt-7b": (32, 4096, 32),
    "mpt-13b": (40, 5120, 40),
    "mpt-30b": (48, 7168, 56),
    "mpt-70b": (80, 8192, 64),
}
_LLAMA = {  # layers, width, heads, ffn
    "llama2-70b": (80, 8192, 64, 28672),
    "llama3-8b": (32, 4096, 32, 14336),
    "llama3-70b": (80, 8192, 64, 28672),
    "llama3.1-8b": (32, 4096, 32, 14336),
    "llama3.1-70b": (80, 8192, 64, 28672),
    "llama3.1-405b": (126, 16384, 128, 53248),
}
_NEMOTRON = {"nemotron4-15b": (32, 6144, 48, 24576), "nemotron4-340b": (96, 18432, 96, 73728)}
# gpt-5b: class NVIDIA5B of Paxml's contributed configurations (layers, width, heads, vocabulary).
_GPT = {"gpt3-175b": (96, 12288, 96), "gpt-175b": (96, 12288, 96), "gpt-5b": (24, 4096, 32)}


def published_shape(model: str, seq_len: int) -> ModelSpec | None:
    """The shape of a named model; None where nothing here can say it.

    `seq_len` is the rows of learned positions.
    """
    if model in _MPT:
        layers, width, heads = _MPT[model]
        return gpt_shape(model, (layers, width, heads), seq_len, _MPT_VOCAB)
    if model in _GPT:
        return gpt_shape(model, _GPT[model], seq_len, _GPT_VOCAB)
    if model in _LLAMA:
        layers, width, heads, ffn = _LLAMA[model]
        vocab = 32000 if model.startswith("llama2") else 128256
        return _gated(model, (layers, width, heads, 8), ffn, vocab)
    if model in _NEMOTRON:
        layers, width, heads, ffn = _NEMOTRON[model]
        return _gated(model, (layers, width, heads, 8), ffn, 256000).model_copy(
            update={"mlp": "squared_relu", "norm": "layer"}
        )
    if model == "grok1-314b":
        shape = _gated(model, (64, 6144, 48, 8), 32768, 128256)
        experts = Experts(count=8, per_token=2, d_ff=32768)
        return shape.model_copy(update={"mlp": "geglu", "experts": experts})
    return load_model(model) if model in _PRESETS else None


def gpt_shape(
    name: str, sizes: tuple[int, int, int], seq_len: int, vocab: int, *, dropout: bool = False
) -> ModelSpec:
    """A model built as GPT-3 is: learned positions, biases, tied embeddings, 4 x as wide inside.

    `sizes` are layers, width and heads.
    """
    layers, width, heads = sizes
    return ModelSpec(
        name=name,
        num_layers=layers,
        d_model=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        d_ff=4 * width,
        vocab_size=vocab,
        mlp="gelu",
        norm="layer",
        positions="learned",
        max_positions=seq_len,
        biases=True,
        qkv_bias=True,
        dropout=dropout,
        tied_embeddings=True,
    )


def _gated(name: str, sizes: tuple[int, int, int, int], ffn: int, vocab: int) -> ModelSpec:
    layers, width, heads, kv_heads = sizes
    return ModelSpec(
        name=name,
        num_layers=layers,
        d_model=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width // heads,
        d_ff=ffn,
        vocab_size=vocab,
    )


def weighted_stages(num_layers: int, stages: int) -> tuple[int, ...] | None:
    """Layers of each stage where the embedding and the loss count as one layer each.

    None where stages would not be equal even so.
    """
    if (num_layers + 2) % stages or stages < 2:
        return None
    each = (num_layers + 2) // stages
    return (each - 1, *[each] * (stages - 2), each - 1)


def filled_stages(num_layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage where all have as many but the last ones, which have what is left.

    >>> filled_stages(62, 16)[-2:], filled_stages(62, 32)[-2:]
    ((4, 2), (2, 0))
    """
    each = -(-num_layers // stages)
    return tuple(min(each, max(0, num_layers - stage * each)) for stage in range(stages))
