"""Which blocks are of one kind, and which parameters are one flat tensor."""

from collections.abc import Collection
from typing import Any

from torch import nn

from twinstream.executor.modules.capture import POSTLUDE, PRELUDE, Capture, Read
from twinstream.models.layout import ADAPTERS, EMBEDDING, HEAD
from twinstream.models.traced import SHARED, TIED, UNUSED, TracedGroup, TracedTensor


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


def _first_place(places: set[int], num_blocks: int) -> int:
    """Where in the forward pass a group is first read; what is never read comes last."""
    order = [num_blocks if place == POSTLUDE else place for place in places]
    return min(order, default=num_blocks + 1)
