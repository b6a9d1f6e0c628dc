"""Which blocks are of one kind, and which parameters are one flat tensor."""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from twinstream.executor.modules.capture import POSTLUDE, PRELUDE, Capture, Read
from twinstream.models.layout import ADAPTERS, EMBEDDING, HEAD
from twinstream.models.providers.traced_parts import (
    SHARED,
    STATE,
    TIED,
    UNUSED,
    TracedGroup,
    TracedTensor,
)


def kind_key(module: nn.Module, found: Capture, index: int) -> tuple[Any, ...]:
    """What blocks of one kind have in common; the class first."""
    call = found.calls[index]
    tensors = [*call.module.named_parameters(), *call.module.named_buffers()]
    scalars = [
        (name, key, value)
        for name, part in call.module.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, bool | int | float | str) and "layer_id" not in key
    ]
    read = [
        (leaf.index, *_role(found, call.inputs[leaf.index]))
        if isinstance(leaf, Read)
        else repr(leaf)
        for leaf in call.leaves
        if isinstance(leaf, Read | bool | int | float | str | None)
    ]
    outputs = [(str(path), *_role(found, name)) for name, path in call.outputs.items()]
    return (
        type(call.module).__name__,
        tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors),
        tuple(scalars),
        tuple(read),
        tuple(outputs),
    )


def _role(found: Capture, name: str) -> tuple[Any, ...]:
    value = found.values[name]
    return value.shape, value.dtype, value.has_gradient


def groups_of(
    module: nn.Module, found: Capture, adapters: Collection[str]
) -> dict[str, tuple[TracedGroup, set[int]]]:
    """Parameters by the places that read them, in the order of the forward pass.

    Parameters that nothing reads are group `unused`; `adapters` have groups of their own.
    """
    users: dict[str, set[int]] = {name: set() for name, _ in module.named_parameters()}
    for place, names in found.used.items():
        for name in names & users.keys():
            users[name].add(place)
    shared: list[set[int]] = []
    members: dict[str, list[str]] = {}
    places: dict[str, set[int]] = {}
    for name, used in users.items():
        if name in adapters:
            group = ADAPTERS + "_".join(map(str, sorted(used)))
        elif used == {PRELUDE}:
            group = EMBEDDING
        elif used == {PRELUDE, POSTLUDE}:
            group = TIED if {PRELUDE} in users.values() else EMBEDDING
        elif used == {POSTLUDE}:
            group = HEAD
        elif len(used) == 1:
            group = str(next(iter(used)))
        elif not used:
            group = UNUSED
        else:
            if used not in shared:
                shared.append(used)
            group = f"{SHARED}{shared.index(used)}"
        members.setdefault(group, []).append(name)
        places[group] = places.get(group, set()) | used
    num_blocks = len(found.calls)
    order = sorted(members, key=lambda group: _first_place(places[group], num_blocks))
    parameters = dict(module.named_parameters())
    return {
        group: (
            TracedGroup(
                name=group,
                layer=int(alone) if (alone := group.removeprefix(ADAPTERS)).isdigit() else None,
                tensors=tuple(
                    TracedTensor(name=name, shape=tuple(parameters[name].shape))
                    for name in members[group]
                ),
            ),
            places[group],
        )
        for group in order
    }


def state_groups(module: nn.Module, found: Capture, itemsize: int) -> dict[int, TracedGroup]:
    """Of each block the buffers that it changes in training, as flat tensors of the model's dtype;
    a count lies there as bytes.

    Only batch norm's: its outputs in training do not depend on them, so that a block may run again
    for its backward pass without them.
    """
    buffers, changed = dict(module.named_buffers()), changed_buffers(module, found)
    of_norms = {
        id(buffer) for part in module.modules() if isinstance(part, _BatchNorm)
        for buffer in part.buffers()
    }  # fmt: skip
    groups: dict[int, TracedGroup] = {}
    for index, call in enumerate(found.calls):
        own = {id(buffer) for buffer in call.module.buffers()}
        names = [name for name in buffers if name in changed and id(buffers[name]) in own]
        if not names or not {id(buffers[name]) for name in names} <= of_norms:
            continue
        tensors = tuple(
            TracedTensor(name=name, shape=_stored_shape(buffers[name], itemsize)) for name in names
        )
        groups[index] = TracedGroup(name=f"{STATE}{index}", layer=index, tensors=tensors)
    return groups


def changed_buffers(module: nn.Module, found: Capture) -> set[str]:
    """Names of those that a training step changes. Of batch norm a run without memory tells of the
    count alone, whose fellows are its statistics."""
    changed = set(found.changed_buffers)
    for name, part in module.named_modules():
        own = {f"{name}.{key}" if name else key for key, _ in part.named_buffers(recurse=False)}
        if isinstance(part, _BatchNorm) and own & changed:
            changed |= own
    return changed


def _stored_shape(buffer: torch.Tensor, itemsize: int) -> tuple[int, ...]:
    if buffer.is_floating_point():
        return tuple(buffer.shape)
    return (buffer.numel() * buffer.element_size() // itemsize,)


def _first_place(places: set[int], num_blocks: int) -> int:
    """Where in the forward pass a group is first read; what is never read comes last."""
    order = [num_blocks if place == POSTLUDE else place for place in places]
    return min(order, default=num_blocks + 1)
