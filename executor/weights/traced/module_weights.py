"""Parameters of a traced module between its own tensors and the flat tensors of a schedule."""

from collections.abc import Iterator, Mapping

import torch

from twinstream.executor.modules.building import build_module
from twinstream.models.layout import ADAPTERS
from twinstream.models.providers.traced import TracedModel


def fresh_module_parameters(model: TracedModel, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Each group's flat parameters in turn, as the module's own code draws them after this seed.

    The whole module is made at once: for a while its parameters are there twice.
    """
    source = model.source.model_copy(update={"lora": None})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = build_module(
            source, getattr(torch, model.dtype), model.attention, with_parameters=True
        )
    yield from flat_groups(
        model, {**dict(module.named_parameters()), **dict(module.named_buffers())}
    )


def flat_groups(
    model: TracedModel, parameters: Mapping[str, torch.Tensor], *, adapters: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """The groups of the base, or those of adapters beside it, in the order of the forward pass."""
    for group in model.parameter_groups:
        if group.startswith(ADAPTERS) == adapters:
            yield group, flat_group(model, group, parameters)


def flat_group(
    model: TracedModel, group: str, parameters: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """The flat parameters of a group, 1-D uint8; padding is zero."""
    layout = model.group_layout(group)
    flat, dtype = torch.zeros(layout.size_bytes, dtype=torch.uint8), getattr(torch, model.dtype)
    for inner in layout.tensors:
        view = flat[inner.offset_bytes : inner.offset_bytes + inner.size_bytes].view(dtype)
        tensor = parameters[inner.name].detach().reshape(-1)
        view.copy_(tensor if tensor.is_floating_point() else tensor.view(dtype))
    return flat
