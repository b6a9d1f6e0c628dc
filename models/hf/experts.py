"""The sizes in a Hugging Face config.json of mixtral or qwen3_moe.

What changes neither sizes nor FLOPs is not read; what would change them is refused by name.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, PositiveInt, ValidationError

from twinstream.models.hf.config import (
    DEFAULT_WINDOW,
    READ_STRICTLY,
    HfConfigError,
    Refusal,
    UnsupportedConfigError,
    config_name,
    describe_problems,
)
from twinstream.models.rope import PositiveFinite

EXPERT_MODEL_TYPES = ("mixtral", "qwen3_moe")

# Of both; a key that is absent means the first.
_NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "attention_bias": (False, None),
    "decoder_sparse_step": (1,),
    "hidden_act": ("silu", "swish"),
    "mlp_only_layers": ([], None),
    "sliding_window": (None,),
    "use_sliding_window": (False,),
}
_REASONS = {
    "attention_bias": "it adds a bias to the output projection as well",
    "decoder_sparse_step": "every layer has experts",
    "mlp_only_layers": "every layer has experts",
    "sliding_window": "attention is causal and full",
    "use_sliding_window": "attention is causal and full",
}


class _Config(BaseModel):
    """The keys that are read; all others end in `model_extra`."""

    model_config = READ_STRICTLY

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt | None = None
    vocab_size: PositiveInt
    num_experts_per_tok: PositiveInt
    num_local_experts: PositiveInt | None = None
    num_experts: PositiveInt | None = None
    moe_intermediate_size: PositiveInt | None = None
    tie_word_embeddings: bool = False
    rms_norm_eps: PositiveFinite | None = None
    rope_theta: PositiveFinite | None = None
    dtype: str | None = None
    torch_dtype: str | None = None


def read_expert_config(
    file: Path, raw: Mapping[str, Any], longest: int | None = None
) -> dict[str, Any]:
    """The fields of a ModelSpec, from a config.json of one of `EXPERT_MODEL_TYPES`.

    Args:
        longest: tokens of the longest sequence, which a sliding window may be no shorter than.

    Raises:
        HfConfigError: the file is incomplete.
        UnsupportedConfigError: it asks for other layers or another attention.
    """
    try:
        config = _Config.model_validate(raw)
    except ValidationError as error:
        raise HfConfigError(path=file, problem=describe_problems(error)) from None
    is_qwen = raw["model_type"] == "qwen3_moe"
    if refusals := tuple(_refusals(raw, is_qwen, longest)):
        raise UnsupportedConfigError(path=file, refusals=refusals)
    dtype = config.dtype or config.torch_dtype
    return {
        "name": config_name(file, raw["model_type"]),
        "num_layers": config.num_hidden_layers,
        "d_model": config.hidden_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": _head_dim(file, config),
        "d_ff": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "norm_eps": config.rms_norm_eps or (1e-6 if is_qwen else 1e-5),
        "rope_theta": config.rope_theta or (1e4 if is_qwen else 1e6),
        "qk_norm": is_qwen,
        "tied_embeddings": config.tie_word_embeddings,
        "dtype": "float32" if dtype == "float32" else "bfloat16",
        "experts": _experts(file, config, is_qwen),
    }


def _experts(file: Path, config: _Config, is_qwen: bool) -> dict[str, int]:
    # transformers 4 wrote num_experts of qwen3_moe, 5 writes num_local_experts
    count = config.num_local_experts or (config.num_experts if is_qwen else None)
    d_ff = config.moe_intermediate_size if is_qwen else config.intermediate_size
    if count is None:
        key = "num_experts" if is_qwen else "num_local_experts"
        raise HfConfigError(path=file, problem=f"key '{key}' is missing")
    if d_ff is None:
        raise HfConfigError(path=file, problem="key 'moe_intermediate_size' is missing")
    return {"count": count, "per_token": config.num_experts_per_tok, "d_ff": d_ff}


def _head_dim(file: Path, config: _Config) -> int:
    if config.head_dim is not None:
        return config.head_dim
    head_dim, rest = divmod(config.hidden_size, config.num_attention_heads)
    if rest:
        raise HfConfigError(
            path=file,
            problem=f"hidden_size {config.hidden_size} is not a multiple of num_attention_heads "
            f"{config.num_attention_heads}, and there is no head_dim",
        )
    return head_dim


def _refusals(raw: Mapping[str, Any], is_qwen: bool, longest: int | None) -> Iterator[Refusal]:
    for key, neutral in _NEUTRAL_VALUES.items():
        if key == "sliding_window" and (is_qwen or _covers(raw.get(key), longest)):
            continue  # of qwen in use only with use_sliding_window
        if key == "use_sliding_window" and _covers(
            raw.get("sliding_window", DEFAULT_WINDOW), longest
        ):
            continue
        if (value := raw.get(key, neutral[0])) not in neutral:
            yield Refusal(key, value, _REASONS.get(key, "only silu is"))


def _covers(window: object, longest: int | None) -> bool:
    return isinstance(window, int) and longest is not None and longest <= window
