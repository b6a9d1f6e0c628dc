"""Whether documents that are packed into one row see each other, found out on a small copy."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Literal

import torch
from torch import nn

from twinstream.executor.modules.batches import documents
from twinstream.executor.modules.blocks import ModuleRefusal
from twinstream.executor.modules.building import build_module, parameter_slots, placed
from twinstream.executor.modules.calling import module_inputs, run_module
from twinstream.models.providers.traced import ModuleSource

Packing = Literal["isolated", "isolated_by_mask", "leaks", "unknown"]
_TOLERANCE = 1e-4  # relative to the largest logit; rounding makes 1e-6, the least leak seen 1e-3
_MOST_PARAMETERS = 1e8
_LENGTHS = (19, 24)  # of the documents, in tokens

# Of a config's keys, what a narrow model of the same kind has.
NARROW: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 128),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim"), 64),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("ffn_hidden_size", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_intermediate_size"), 32),
    **dict.fromkeys(("shared_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim", "index_head_dim"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 256),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "index_topk"), 8),
    **dict.fromkeys(("index_n_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("hidden_size_per_layer_input", "global_head_dim"), 16),
    "laurel_rank": 8,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id"), 1),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "dropout", "embd_pdrop"), 0.0),
    **dict.fromkeys(("attn_pdrop", "resid_pdrop", "hidden_dropout_prob", "embed_dropout"), 0.0),
    **dict.fromkeys(("activation_dropout", "attention_probs_dropout_prob", "resid_dropout"), 0.0),
    "residual_dropout": 0.0,
    **dict.fromkeys(("embedding_dropout", "layerdrop", "decoder_layerdrop"), 0.0),
    **dict.fromkeys(("router_jitter_noise", "input_jitter_noise"), 0.0),
    **dict.fromkeys(("mamba_d_state", "state_size", "mamba_dt_rank", "time_step_rank"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    "mamba_d_ssm": 128,
    "mamba_n_groups": 1,
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
}
_COUNTS = (
    *("vocab_size", "vocab_size_per_layer_input", "num_experts", "num_local_experts"),
    *("n_routed_experts", "moe_num_experts", "num_experts_per_tok", "moe_k", "moe_topk"),
    *("n_group", "topk_group", "first_k_dense_replace", "sliding_window"),
    *("attention_window_size", "attention_chunk_size"),
)
_RULES: tuple[dict[str, bool], ...] = ({}, {"keeps_widths": True})
# What a config says whose sizes depend on each other in ways of its own.
_UNFIT = (ModuleRefusal, RuntimeError, ValueError, LookupError, TypeError, AttributeError)
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_UNLISTED_LAYERS = 4


def isolates_documents(source: ModuleSource, attention: str | None = None) -> Packing:
    """Whether a document's logits are what they are alone, and whatever comes before it in a row.

    `isolated_by_mask` needs masks that know the positions, which a `ModuleProgram` of a packed
    model gives. A small copy with random weights answers; `unknown` where none can be made.
    """
    small = [source]
    if source.kind == "transformers":
        configs = [_narrow_text(source.config or {}, **rule) for rule in _RULES]
        small = [source.model_copy(update={"config": config}) for config in configs]
    for one in small:
        with torch.random.fork_rng(devices=[]), suppress(*_UNFIT):
            torch.manual_seed(0)
            module = build_module(one, torch.float32, attention).eval()
            if sum(parameter.numel() for parameter in module.parameters()) <= _MOST_PARAMETERS:
                with _random_parameters(module):
                    return _answer(module)
    return "unknown"


def _narrow_text(config: dict[str, Any], **rule: bool) -> dict[str, Any]:
    """The same of a whole model, whose text part alone is built."""
    if not isinstance(text := config.get("text_config"), dict):
        return narrow_config(config, **rule)
    return {**config, "text_config": narrow_config(text, **rule)}


def narrow_config(config: dict[str, Any], *, keeps_widths: bool = False) -> dict[str, Any]:
    """The config of a narrow model with one layer of each kind, or four."""
    rule = {key: NARROW[key] for key in _COUNTS} if keeps_widths else NARROW
    layers = next((config[key] for key in _LAYERS if isinstance(config.get(key), int)), 0)
    lists = {
        key: value
        for key, value in config.items()
        if isinstance(value, list | str) and len(value) == layers and layers > 1
    }
    chosen = list(range(min(layers, _UNLISTED_LAYERS)))
    if lists:
        kinds = list(zip(*lists.values(), strict=True))
        chosen = sorted(kinds.index(kind) for kind in dict.fromkeys(kinds))
        chosen = chosen if len(chosen) > 1 else [*chosen, *range(1, min(layers, 3))]
        if config.get("num_kv_shared_layers"):  # the last layers read keys of the first
            chosen += sorted(layers - 1 - kinds[::-1].index(kind) for kind in dict.fromkeys(kinds))
    narrow = {k: v if v is None else rule.get(k, v) for k, v in config.items()}
    if config.get("num_kv_shared_layers") and lists:
        narrow["num_kv_shared_layers"] = len(chosen) // 2
    if {"num_heads", "expand"} <= narrow.keys() and not keeps_widths:  # heads of state spaces
        narrow |= {"num_heads": 8, "head_dim": 16, "n_groups": 1, "expand": 2}
    for key, value in config.items():  # what is said of single layers, by their number
        if isinstance(value, dict) and value and all(str(number).isdigit() for number in value):
            said = {int(number): one for number, one in value.items()}
            narrow[key] = {chosen.index(n): said[n] for n in said if n in chosen}
    if not keeps_widths:
        narrow |= latent_heads(narrow) | _narrow_rotary(narrow)
    for key, value in lists.items():
        part = [value[index] for index in chosen]
        narrow[key] = "".join(part) if isinstance(value, str) else part
    narrow |= {key: len(chosen) for key in _LAYERS if isinstance(config.get(key), int)}
    return narrow


def _narrow_rotary(config: dict[str, Any]) -> dict[str, Any]:
    """Factors of as many frequencies as narrow heads have (`longrope`)."""
    found = {}
    for key in ("rope_parameters", "rope_scaling"):
        told = config.get(key)
        if isinstance(told, dict) and isinstance(told.get("long_factor"), list):
            heads = config.get("num_attention_heads") or 1
            width = config.get("head_dim") or config.get("hidden_size", 0) // heads
            share = told.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
            count = int(width * share) // 2
            lists = ("long_factor", "short_factor")
            found[key] = told | {name: told[name][:count] for name in lists if name in told}
    return found


def latent_heads(config: dict[str, Any]) -> dict[str, Any]:
    """With a latent there are as many heads of keys; the rotary part's width is the head_dim."""
    if "kv_lora_rank" not in config or "qk_rope_head_dim" not in config:
        return {}
    heads, width = config["num_attention_heads"], config["qk_rope_head_dim"]
    return {"num_key_value_heads": heads, "head_dim": width}


def _answer(module: nn.Module) -> Packing:
    first, second = _LENGTHS
    ids = torch.randint(2, 100, (3, first + second))
    ids[1, first:] = ids[0, first:]  # the second document again, after another first one
    positions = torch.cat([torch.arange(first), torch.arange(second)])[None]
    alone = _logits(module, ids[:1, first:], torch.arange(second)[None], is_told=False)
    if not bool(alone.isfinite().all()):
        return "unknown"
    for answer, is_told in (("isolated", False), ("isolated_by_mask", True)):
        packed = [_logits(module, ids[i : i + 1], positions, is_told)[:, first:] for i in (0, 1)]
        errors = [float((found - alone).abs().max() / alone.abs().max()) for found in packed]
        if max(errors) <= _TOLERANCE:
            return "isolated" if answer == "isolated" else "isolated_by_mask"
    return "leaks"


def _logits(
    module: nn.Module, ids: torch.Tensor, positions: torch.Tensor, is_told: bool
) -> torch.Tensor:
    masks = documents(positions) if is_told else nullcontext()
    with torch.no_grad(), masks:
        return run_module(
            module, module_inputs(module, {"input_ids": ids, "position_ids": positions})
        )


@contextmanager
def _random_parameters(module: nn.Module) -> Iterator[None]:
    """Random weights in place of those without memory."""
    slots = parameter_slots(module)
    tensors = {
        name: torch.randn(place[key].shape) / math.sqrt(place[key].shape[-1])
        if place[key].dim() > 1
        else 1 + 0.1 * torch.randn(place[key].shape)
        for place, key, name in slots
    }
    with placed(slots, tensors):
        yield
