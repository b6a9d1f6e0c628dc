"""Rotary frequencies that transformers remakes from the longest position of a batch.

`longrope` has others above the length that a model was first trained with, `dynamic` above its
longest, and keeps them. Up to there they are the same for every batch, and are held.
"""

from typing import Any

from torch import nn

from twinstream.models.traced_parts import PositionLimit

POSITIONS = "twinstream_positions"  # attribute of a module: the limit that its rotary ones have
_REMADE = ("longrope", "dynamic")


def hold_frequencies(module: nn.Module) -> PositionLimit | None:
    """Rotary frequencies that are remade for long sequences stay those of short ones.

    Returns:
        The longest sequence for which that is so; None where none are remade.
    """
    limits = []
    for name, part in module.named_modules():
        kinds = getattr(part, "rope_type", None)
        of_layers = kinds if isinstance(kinds, dict) else {None: kinds}
        remade = {layer: k for layer, k in of_layers.items() if k in _REMADE}
        for layer, kind in remade.items():
            why = f"the frequencies of its {kind} rotary embedding '{name}' change above that"
            limits.append(PositionLimit(tokens=_unchanged(part, layer, kind), why=why))
        if remade:
            held = of_layers | dict.fromkeys(remade, "default")
            part.rope_type = held if isinstance(kinds, dict) else "default"
    return min(limits, key=lambda one: one.tokens, default=None)


def _unchanged(part: Any, layer: str | None, kind: str) -> int:
    """Tokens of the longest sequence whose frequencies are those that the part begins with."""
    if kind == "dynamic":
        return int(getattr(part, f"{layer}_max_seq_len_cached", part.max_seq_len_cached))
    config, name = part.config, "original_max_position_embeddings"
    told = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    told = told if layer is None else told.get(layer, told)
    found = told.get(name) or getattr(config, name, None) or config.max_position_embeddings
    return int(found)
