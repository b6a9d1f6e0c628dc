"""LoRA in somebody's module: two small matrices beside linear layers of its blocks."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from twinstream.executor.modules.blocks import ModuleRefusal, blocks_of
from twinstream.models.recipes.lora import ModuleLora

_A, _B = "lora_A", "lora_B"


def add_adapters(module: nn.Module, lora: ModuleLora) -> None:
    """Put adapters beside the targets in the module's blocks, as PEFT computes them.

    A layer keeps its name and its weight; A [rank, in] and B [out, rank] are `lora_A.weight` and
    `lora_B.weight` below it. The base is frozen.

    Raises:
        ModuleRefusal: a target is no linear layer of a block; says which there are.
    """
    if own := [name for name, _ in module.named_parameters() if is_adapter(name)]:
        raise ModuleRefusal(
            f"{type(module).__name__} has adapters of its own ({own[0]}): leave out --lora"
        )
    module.requires_grad_(requires_grad=False)
    linear = dict(_linear_layers(module))
    known = sorted({name.rpartition(".")[2] for name in linear})
    for target in lora.targets:
        if not any(lora.model_copy(update={"targets": (target,)}).covers(name) for name in linear):
            raise ModuleRefusal(
                f"the blocks of {type(module).__name__} have no linear layer '{target}' for "
                f"adapters: there are {', '.join(known) or 'none'}"
            )
    for name, layer in linear.items():
        if lora.covers(name):
            _adapt(layer, lora)


def _linear_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    prefix, blocks = blocks_of(module)
    for name, layer in blocks.named_modules():
        # MultiheadAttention reads the weight of its out_proj, which never runs.
        if type(layer).__name__ == "NonDynamicallyQuantizableLinear":
            continue
        if isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D":
            yield f"{prefix}.{name}", layer


def _adapt(layer: Any, lora: ModuleLora) -> None:
    if hasattr(layer, _A):  # shared by several blocks
        return
    is_transposed = not isinstance(layer, nn.Linear)
    inside, outside = layer.weight.shape if is_transposed else layer.weight.shape[::-1]
    plain = type(layer)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        found = plain.forward(self, x)  # first, as PEFT: autograd adds in this order
        x = nn.functional.dropout(x, lora.dropout, self.training and lora.dropout > 0)
        adapted: torch.Tensor = found + getattr(self, _B)(getattr(self, _A)(x)) * lora.scale
        return adapted

    layer.add_module(_A, nn.Linear(inside, lora.rank, bias=False, dtype=layer.weight.dtype))
    layer.add_module(_B, nn.Linear(lora.rank, outside, bias=False, dtype=layer.weight.dtype))
    layer.__class__ = type(f"{plain.__name__}WithLora", (plain,), {"forward": forward})


def is_adapter(name: str) -> bool:
    """Whether a parameter is one of an adapter's matrices."""
    return f".{_A}." in name or f".{_B}." in name
