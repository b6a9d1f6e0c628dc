"""What a Hugging Face config.json says of experts: how many, how wide, and how they are chosen."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt

from twinstream.models.options import PositiveFinite
from twinstream.schedule.errors import TwinstreamError

READ_STRICTLY = ConfigDict(frozen=True, extra="allow", strict=True, protected_namespaces=())

_OF_QWEN = ("qwen2_moe", "qwen3_moe")
_OF_DEEPSEEK = ("dots1", "glm4_moe")  # their router, with grouped-query attention
EXPERT_MODEL_TYPES = ("mixtral", "olmoe", *_OF_QWEN, *_OF_DEEPSEEK)
_HARMLESS = ("output_router_logits", "router_aux_loss_coef", "num_nextn_predict_layers")
_COUNTS = frozenset({"num_local_experts", "num_experts", "num_experts_per_tok"})
_QWEN = _COUNTS | {"moe_intermediate_size", "norm_topk_prob", "mlp_only_layers",
                   "decoder_sparse_step"}  # fmt: skip
_DEEPSEEK = _COUNTS | {"n_routed_experts", "moe_intermediate_size", "n_shared_experts", "n_group",
                       "norm_topk_prob", "topk_group", "routed_scaling_factor",
                       "first_k_dense_replace"}  # fmt: skip
_KEYS = {  # that change what a family computes
    "mixtral": _COUNTS | {"router_jitter_noise"},
    "olmoe": _COUNTS | {"norm_topk_prob", "clip_qkv"},
    "qwen2_moe": _QWEN | {"shared_expert_intermediate_size"},
    "qwen3_moe": _QWEN,
    "dots1": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
}
_AUX_LOSS = {"mixtral": 0.001, "olmoe": 0.01, "qwen2_moe": 0.001, "qwen3_moe": 0.001}


class ExpertsError(TwinstreamError):
    """A config.json lacks what has to be known of its experts."""


class ExpertKeys(BaseModel):
    """The keys that are read of experts; transformers 4 and 5 write some under two names."""

    model_config = READ_STRICTLY

    num_local_experts: PositiveInt | None = None
    num_experts: PositiveInt | None = None
    n_routed_experts: PositiveInt | None = None
    num_experts_per_tok: PositiveInt | None = None
    moe_intermediate_size: PositiveInt | None = None
    shared_expert_intermediate_size: NonNegativeInt | None = None
    n_shared_experts: NonNegativeInt | None = None
    norm_topk_prob: bool | None = None
    n_group: PositiveInt | None = None
    topk_group: PositiveInt | None = None
    routed_scaling_factor: PositiveFinite | None = None
    mlp_only_layers: list[int] | None = None
    decoder_sparse_step: PositiveInt | None = None
    first_k_dense_replace: NonNegativeInt | None = None
    output_router_logits: bool | None = None
    router_aux_loss_coef: float | None = None
    router_jitter_noise: float | None = None
    clip_qkv: float | None = None
    num_nextn_predict_layers: NonNegativeInt | None = None


def expert_refusals(keys: ExpertKeys, model_type: str) -> Iterator[tuple[str, object, str]]:
    """Key, value and reason of what would change the computation and is not implemented."""
    of_family = _KEYS.get(model_type, frozenset())
    why = "it is no key of" if of_family else "there are no experts in"
    for name in ExpertKeys.model_fields:
        if name not in of_family and name not in _HARMLESS and getattr(keys, name):
            yield name, getattr(keys, name), f"{why} {model_type}"
    if model_type in EXPERT_MODEL_TYPES and keys.router_jitter_noise:
        yield "router_jitter_noise", keys.router_jitter_noise, "routers have no noise here"
    if model_type in EXPERT_MODEL_TYPES and keys.clip_qkv is not None:
        yield "clip_qkv", keys.clip_qkv, "Q, K and V are not clipped here"


def experts_of(
    keys: ExpertKeys, model_type: str, num_layers: int, intermediate_size: int
) -> dict[str, Any] | None:
    """The fields of `Experts`; None of a model without any.

    Raises:
        ExpertsError: a number is missing.
    """
    if model_type not in EXPERT_MODEL_TYPES:
        return None
    is_deepseek = model_type in _OF_DEEPSEEK
    count_key = "num_local_experts" if model_type == "mixtral" else "num_experts"
    count_key = "n_routed_experts" if is_deepseek else count_key
    count = keys.num_local_experts or keys.num_experts or keys.n_routed_experts
    d_ff = intermediate_size if model_type in ("mixtral", "olmoe") else keys.moe_intermediate_size
    needed = {
        count_key: count,
        "num_experts_per_tok": keys.num_experts_per_tok, "moe_intermediate_size": d_ff,
    }  # fmt: skip
    if missing := [name for name, value in needed.items() if value is None]:
        raise ExpertsError(f"key '{missing[0]}' is missing")
    assert d_ff is not None
    found: dict[str, Any] = {
        "count": count, "per_token": keys.num_experts_per_tok, "d_ff": d_ff,
        "normalized": model_type == "mixtral" or keys.norm_topk_prob is True,
        "dense_layers": _dense_layers(keys, model_type, num_layers),
    }  # fmt: skip
    if model_type == "qwen2_moe":
        if not keys.shared_expert_intermediate_size:
            raise ExpertsError("key 'shared_expert_intermediate_size' is missing")
        found |= {"shared_d_ff": keys.shared_expert_intermediate_size, "shared_gate": True}
    if is_deepseek:
        shared = 1 if model_type == "glm4_moe" and keys.n_shared_experts is None else 0
        found |= {
            "scores": "sigmoid", "correction_bias": True,
            "shared_d_ff": (keys.n_shared_experts or shared) * d_ff,
            "num_groups": keys.n_group or 1, "groups_per_token": keys.topk_group or 1,
            "scale": keys.routed_scaling_factor or 1.0,
            "normalized": keys.norm_topk_prob is not False if model_type == "glm4_moe"
            else keys.norm_topk_prob is True,
        }  # fmt: skip
    if keys.output_router_logits and model_type in _AUX_LOSS:
        told = keys.router_aux_loss_coef
        found["aux_loss"] = _AUX_LOSS[model_type] if told is None else told
    return found


def _dense_layers(keys: ExpertKeys, model_type: str, num_layers: int) -> tuple[int, ...]:
    if model_type in _OF_DEEPSEEK:
        default = 1 if model_type == "glm4_moe" else 0
        first = keys.first_k_dense_replace
        return tuple(range(min(num_layers, default if first is None else first)))
    if model_type not in _OF_QWEN:
        return ()
    step, only = keys.decoder_sparse_step or 1, keys.mlp_only_layers or ()
    return tuple(i for i in range(num_layers) if i in only or (i + 1) % step)
