"""Config.json of families that are priced here and computed by other people's code.

What changes sizes or work is read; what changes values alone (how RoPE is stretched, how scores are
scaled or clamped, a load-balancing loss) is passed over. A key that is unknown here is refused.
Layers behind the last that predict a token further on (`num_nextn_predict_layers`) are not counted,
since transformers does not build them.
"""

from collections.abc import Callable, Mapping
from typing import Any

from twinstream.models.decoders.keys import HARMLESS_KEYS, says_nothing

Fields = dict[str, Any]
_SIZES = {
    "num_layers": "num_hidden_layers", "d_model": "hidden_size", "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads", "d_ff": "intermediate_size", "vocab_size": "vocab_size",
}  # fmt: skip
_VALUES = frozenset({
    "attention_dropout", "aux_loss_alpha", "ep_size", "experts_per_token", "head_dim", "hidden_act",
    "initial_context_length", "n_group", "num_nextn_predict_layers", "output_router_logits",
    "rms_norm_eps", "rope_interleave", "rope_parameters", "rope_scaling", "rope_theta",
    "router_aux_loss_coef", "scoring_func", "seq_aux", "swiglu_limit", "topk_group", "topk_method",
})  # fmt: skip


class PricedConfigError(Exception):
    """Key, value and reason of an entry that is not as it is priced; None: the key is missing."""

    def __init__(self, key: str, value: object = None, reason: str = "") -> None:
        self.key, self.value, self.reason = key, value, reason
        super().__init__(key)


def _deepseek(raw: Mapping[str, Any]) -> Fields:
    """Latent attention; experts behind the first layers, one of them for all tokens."""
    nope, rope = _count(raw, "qk_nope_head_dim"), _count(raw, "qk_rope_head_dim")
    width = _count(raw, "moe_intermediate_size")
    if raw.get("moe_layer_freq") not in (None, 1):
        raise PricedConfigError("moe_layer_freq", raw["moe_layer_freq"], "only 1 is priced")
    return {
        "head_dim": nope + rope,
        "latent": {
            "kv_rank": _count(raw, "kv_lora_rank"), "rope_dim": rope,
            "v_dim": _count(raw, "v_head_dim"), "q_rank": raw.get("q_lora_rank") or 0,
        },
        "experts": {
            "count": _count(raw, "n_routed_experts"), "d_ff": width,
            "per_token": _count(raw, "num_experts_per_tok"),
            "shared_d_ff": (raw.get("n_shared_experts") or 0) * width,
            "dense_layers": tuple(range(raw.get("first_k_dense_replace") or 0)),
            "scores": "sigmoid", "correction_bias": True,
            "num_groups": raw.get("n_group") or 1, "groups_per_token": raw.get("topk_group") or 1,
            "scale": raw.get("routed_scaling_factor") or 1.0,
            "normalized": raw.get("norm_topk_prob") is not False,
        },
    }  # fmt: skip


def _gpt_oss(raw: Mapping[str, Any]) -> Fields:
    """Biases, a logit of each head in its softmax, and a window in every second layer."""
    layers, window = _count(raw, "num_hidden_layers"), raw.get("sliding_window")
    alternating = [
        "full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)
    ]
    types = raw.get("layer_types") or alternating
    full = [layer for layer, kind in enumerate(types) if kind == "full_attention"]
    experts = {
        "count": _count(raw, "num_local_experts"), "d_ff": _count(raw, "intermediate_size"),
        "per_token": _count(raw, "num_experts_per_tok"),
    }  # fmt: skip
    return {
        "head_dim": _count(raw, "head_dim"), "biases": True, "sinks": True, "experts": experts,
        "window": {"tokens": window, "full_layers": tuple(full)} if window else None,
    }  # fmt: skip


_OF_DEEPSEEK = frozenset({
    "attention_bias", "first_k_dense_replace", "kv_lora_rank", "moe_intermediate_size",
    "moe_layer_freq", "n_routed_experts", "n_shared_experts", "norm_topk_prob",
    "num_experts_per_tok", "q_lora_rank", "qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim",
    "routed_scaling_factor", "v_head_dim",
})  # fmt: skip
_OF_GPT_OSS = frozenset({
    "attention_bias", "head_dim", "layer_types", "num_experts_per_tok", "num_local_experts",
    "sliding_window",
})  # fmt: skip
_FAMILIES: Mapping[str, tuple[Callable[[Mapping[str, Any]], Fields], frozenset[str]]] = {
    "deepseek_v3": (_deepseek, _OF_DEEPSEEK),
    "kimi_k2": (_deepseek, _OF_DEEPSEEK),
    "gpt_oss": (_gpt_oss, _OF_GPT_OSS),
}
PRICED_TYPES = tuple(_FAMILIES)


def priced_fields(raw: Mapping[str, Any]) -> Fields:
    """The fields of a ModelSpec but its name and dtype.

    Raises:
        PricedConfigError: a key is missing, unknown, or has a value that is not priced.
    """
    read, of_family = _FAMILIES[raw["model_type"]]
    known = {*_SIZES.values(), *_VALUES, *HARMLESS_KEYS, *of_family, "architectures", "auto_map",
             "dtype", "torch_dtype", "tie_word_embeddings"}  # fmt: skip
    for key, value in raw.items():
        if key not in known and not says_nothing(key, value):
            raise PricedConfigError(key, value, "unknown key")
    found = {name: _count(raw, key) for name, key in _SIZES.items()} | read(raw)
    if "latent" in found and raw.get("attention_bias"):
        raise PricedConfigError("attention_bias", True, "only without it is priced")
    return found | {"tied_embeddings": raw.get("tie_word_embeddings") is True}


def _count(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if type(value) is not int or value <= 0:
        reason = "" if value is None else "it is no count"
        raise PricedConfigError(key, value, reason)
    return value
