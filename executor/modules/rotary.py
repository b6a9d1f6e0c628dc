"""Rotary embeddings whose frequencies follow from the length of a sequence.

transformers takes the longest position of a batch: `longrope` has other frequencies above the
length that a model was first trained with, `dynamic` makes them anew above its longest, and keeps
them. Where several documents share a batch that says nothing of one of them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from twinstream.executor.modules.blocks import ModuleRefusal
from twinstream.models.traced_parts import PositionLimit

_REMADE = ("longrope", "dynamic")
_LONG = "longrope"


def hold_frequencies(module: nn.Module, *, by_document: bool = False) -> PositionLimit | None:
    """Rotary frequencies that are remade for long sequences stay those of short ones.

    Args:
        by_document: of `longrope` each document has those that it has alone, by its length.

    Returns:
        The longest sequence for which they are transformers'; None where they always are.
    """
    limits = []
    for name, part in module.named_modules():
        kinds = getattr(part, "rope_type", None)
        of_layers = kinds if isinstance(kinds, dict) else {None: kinds}
        remade = {layer: kind for layer, kind in of_layers.items() if kind in _REMADE}
        chosen = {layer: _unchanged(part, layer, kind) for layer, kind in remade.items()}
        for layer, kind in remade.items():
            if by_document and kind == _LONG:
                continue
            why = f"the frequencies of its {kind} rotary embedding '{name}' change above that"
            limits.append(PositionLimit(tokens=chosen[layer], why=why))
        if by_document:
            _choose_by_document(part, {k: n for k, n in chosen.items() if remade[k] == _LONG})
        if remade:
            held = of_layers | dict.fromkeys(remade, "default")
            part.rope_type = held if isinstance(kinds, dict) else "default"
    return min(limits, key=lambda one: one.tokens, default=None)


def grows_with_documents(module: nn.Module) -> bool:
    """Whether a module of transformers has frequencies that can be chosen by document."""
    config: Any = getattr(module, "config", None)
    return config is not None and f"'{_LONG}'" in str(config.to_dict())


def _unchanged(part: Any, layer: str | None, kind: str) -> int:
    """Tokens of the longest sequence whose frequencies are those that the part begins with."""
    if kind == "dynamic":
        return int(getattr(part, f"{layer}_max_seq_len_cached", part.max_seq_len_cached))
    config, name = part.config, "original_max_position_embeddings"
    told = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    told = told if layer is None else told.get(layer, told)
    found = told.get(name) or getattr(config, name, None) or config.max_position_embeddings
    return int(found)


def _choose_by_document(part: Any, limits: Mapping[str | None, int]) -> None:
    """Have a rotary embedding compute with both frequencies, and take for each token those of its
    document.

    Args:
        limits: by kind of layer, tokens of the longest document with the first ones.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    make: Any = ROPE_INIT_FUNCTIONS[_LONG]
    for layer, limit in limits.items():
        more = {} if layer is None else {"layer_type": layer}
        frequencies, _ = make(part.config, torch.device("cpu"), seq_len=limit + 1, **more)
        part.register_buffer(_of_long(layer), frequencies, persistent=False)
    own: Callable[..., Any] = part.forward

    def forward(
        x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None, **more: Any
    ) -> Any:
        told = more if layer_type is None else more | {"layer_type": layer_type}
        short = own(x, position_ids, **told)
        if layer_type not in limits:
            return short
        name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
        buffers = part._buffers
        kept = buffers[name]
        buffers[name] = buffers[_of_long(layer_type)]
        try:
            long = own(x, position_ids, **told)
        finally:
            buffers[name] = kept
        is_long = document_lengths(position_ids) > limits[layer_type]

        def chosen(of_short: torch.Tensor, of_long: torch.Tensor) -> torch.Tensor:
            where = is_long.view(*is_long.shape, *(1 for _ in of_short.shape[is_long.dim() :]))
            return torch.where(where, of_long, of_short)

        return pytree.tree_map(chosen, short, long)

    if limits:
        part.forward = forward


def _of_long(layer: str | None) -> str:
    return "long_inv_freq" if layer is None else f"{layer}_long_inv_freq"


def document_lengths(positions: torch.Tensor) -> torch.Tensor:
    """Of each token of rows [B, T] the length of its document, whose positions begin at 0.

    >>> document_lengths(torch.tensor([[0, 1, 2, 0, 1]])).tolist()
    [[3, 3, 3, 2, 2]]
    """
    if positions.dim() != 2:
        raise ModuleRefusal(
            f"positions of {positions.dim()} axes say of no token how long its document is"
        )
    number = ((positions == 0).cumsum(1) - 1).clamp(min=0)
    lengths = torch.zeros_like(positions).scatter_reduce(1, number, positions + 1, "amax")
    return lengths.gather(1, number)
