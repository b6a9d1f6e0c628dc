"""Runs the prelude, single blocks and the postlude of a traced model, on parameters that are given.

Legend: a chunk is B sequences of S tokens, R rows a slice of its B S rows, D the model's width, V
the vocabulary.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from twinstream.executor.modules.batches import Batch, batches_of
from twinstream.executor.modules.blocks import OWN_LOSS, ModuleRefusal, RowLosses
from twinstream.executor.modules.building import (
    Slot,
    buffer_slots,
    build_module,
    parameter_slots,
    placed,
    tensor_names,
)
from twinstream.executor.modules.calling import (
    NoMemory,
    module_inputs,
    run_module,
)
from twinstream.executor.modules.capture import (
    POSTLUDE,
    PRELUDE,
    Capture,
    Read,
    Unread,
    capture,
)
from twinstream.executor.modules.rows_and_values import row_loss
from twinstream.models.providers.traced import TracedModel

Tensors = Mapping[str, torch.Tensor]


class _Reached(Exception):
    """The prelude has made all its values."""


class ModuleProgram:
    """A traced model's module, with parameters on the meta device until a part of it runs.

    Buffers have the values that are given, or else those of the module's class, on `device`, once.
    Those that a training step changes (`TracedBuffer.is_state`) are among the tensors that a call
    is given.
    """

    def __init__(
        self, model: TracedModel, device: str | torch.device = "cpu", buffers: Tensors | None = None
    ) -> None:
        self.model = model
        self.device = torch.device(device)
        self.module = build_module(model.source, getattr(torch, model.dtype), model.attention)
        found = capture(self.module, model.captured_size, model.is_packed, once=True)
        traced = [(call.inputs, call.outputs) for call in model.calls]
        if traced != [(call.inputs, tuple(call.outputs)) for call in found.calls]:
            raise ModuleRefusal(
                f"'{model.name}' hands on other tensors than when it was traced, with torch "
                f"{model.torch_version} and transformers {model.transformers_version}: trace it "
                "again with twinstream trace"
            )
        given = buffers or {}
        for place, key, name in buffer_slots(self.module):
            place[key] = given.get(name, place[key]).to(self.device)
        self._first = ChunkProgram(
            self.module, found, is_packed=model.is_packed, device=self.device
        )
        self._chunks: dict[tuple[int, int], ChunkProgram] = {}

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The module's buffers, by name."""
        return {name: place[key] for place, key, name in buffer_slots(self.module)}

    def at(self, batch: int, seq_len: int) -> "ChunkProgram":
        """The program for chunks of `batch` sequences of `seq_len` tokens; made once.

        Raises:
            ModuleRefusal: chunks of this size have other values than the traced ones.
        """
        size = (batch, seq_len)
        if size not in self._chunks:
            if (why := self.model.size_refusal(seq_len, seq_len)) is not None:
                raise ModuleRefusal(why)
            chunk = self._first.resized(size)
            for value in self.model.values:
                chunk.set_shape(value.name, value.shape_at(batch, seq_len))
            self._chunks[size] = chunk
        return self._chunks[size]


class ChunkProgram:
    """The parts of a module, for chunks of one size."""

    def __init__(
        self, module: nn.Module, found: Capture, *, is_packed: bool, device: torch.device
    ) -> None:
        self.module, self.found, self.is_packed, self.device = module, found, is_packed, device
        self.batches = batches_of(module, is_packed)
        self._own_loss: RowLosses | None = getattr(module, OWN_LOSS, None)
        self._prelude_slots = self._slots(found.used[PRELUDE])
        self._postlude_slots = self._slots(found.used[POSTLUDE], found.postlude_modules)
        self._hidden_buffers = [
            slot for slot in buffer_slots(module) if slot not in self._postlude_slots
        ]
        self._meta_buffers = {
            name: torch.empty_like(place[key], device="meta")
            for place, key, name in self._hidden_buffers
        }
        names = tensor_names(module)
        self._block_slots = [
            [
                (place, key, names[id(place[key])])
                for place, key, _ in (*parameter_slots(call.module), *buffer_slots(call.module))
            ]
            for call in found.calls
        ]
        self._wanted = {
            name: value.source for name, value in found.values.items() if value.source is not None
        }
        self._fillers: dict[Unread, torch.Tensor] = {}

    def resized(self, size: tuple[int, int]) -> "ChunkProgram":
        """The program for another size: shapes that blocks do not read follow from the prelude's.

        Shapes of what blocks make are not known before they run (`set_shape`).
        """
        calls = [replace(call, leaves=list(call.leaves)) for call in self.found.calls]
        values = dict(self.found.values)

        def note(index: int, arguments: Any) -> None:
            call = calls[index]
            leaves, spec = pytree.tree_flatten(arguments)
            for at, (leaf, old) in enumerate(zip(leaves, call.leaves, strict=spec == call.spec)):
                if spec == call.spec and isinstance(old, Unread):
                    call.leaves[at] = Unread(tuple(leaf.shape), leaf.dtype)

        with NoMemory():
            slots = self._prelude_slots
            fakes = {name: torch.empty_like(place[key], device="cpu") for place, key, name in slots}
            batch = self.batches.made(size)
            chunk = ChunkProgram(
                self.module, self.found, is_packed=self.is_packed, device=torch.device("cpu")
            )
            with torch.no_grad():
                made = chunk.prelude(fakes, batch, note)
        for name, tensor in zip(self._wanted, made, strict=True):
            values[name] = replace(values[name], shape=tuple(tensor.shape))
        found = replace(self.found, size=size, calls=calls, values=values)
        return ChunkProgram(self.module, found, is_packed=self.is_packed, device=self.device)

    def set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """The shape of a value in chunks of this size."""
        self.found.values[name] = replace(self.found.values[name], shape=shape)

    def _slots(self, used: set[str], only: set[int] | None = None) -> list[Slot]:
        """Slots of the used tensors; of a shared one, those of modules that the part calls."""
        slots = [*parameter_slots(self.module), *buffer_slots(self.module)]
        chosen = [slot for slot in slots if slot[2] in used]
        if only is None:
            return chosen
        called = [part for part in self.module.modules() if id(part) in only]
        places = {id(place) for part in called for place in (part._parameters, part._buffers)}
        reached = [slot for slot in chosen if id(slot[0]) in places]
        found = {name for _, _, name in reached}
        return reached + [slot for slot in chosen if slot[2] not in found]

    def prelude(
        self, tensors: Tensors, batch: Batch, note: Callable[[int, Any], None] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Values of the prelude, in the document's order.

        Args:
            tensors: parameters of the prelude, by name.
            batch: as `batches` makes it.
            note: is told the number and the (args, kwargs) of each block.
        """
        made: dict[str, torch.Tensor] = {}

        def stub(index: int, arguments: Any) -> Any:
            if note is not None:
                note(index, arguments)
            for name, (place, path) in self._wanted.items():
                if place == index:
                    made[name] = _follow(path, arguments)
            if index + 1 == len(self.found.calls):
                raise _Reached
            return pytree.tree_map_only(torch.Tensor, self._filler, self.found.calls[index].result)

        with (
            self._stubbed(stub),
            self.batches.masks(batch),
            self._given(self._prelude_slots, tensors),
            suppress(_Reached),
        ):
            run_module(self.module, module_inputs(self.module, batch))
        return tuple(made[name] for name in self._wanted)

    def block(
        self, index: int, tensors: Tensors, inputs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Outputs of a block, in the document's order; under autograd where that is enabled."""
        call = self.found.calls[index]
        leaves = [
            inputs[leaf.index]
            if type(leaf) is Read
            else self._filler(leaf)
            if type(leaf) is Unread
            else leaf
            for leaf in call.leaves
        ]
        args, kwargs = pytree.tree_unflatten(leaves, call.spec)
        with self._given(self._block_slots[index], tensors):
            result = call.module(*args, **kwargs)
        everything = (result, args, kwargs)
        return tuple(_follow(path, everything) for path in call.outputs.values())

    def block_backward(
        self,
        index: int,
        tensors: Tensors,
        inputs: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        trained: Collection[str] | None = None,
    ) -> tuple[list[torch.Tensor | None], dict[str, torch.Tensor | None]]:
        """Gradients of a block's inputs and parameters, by running it again under autograd.

        Args:
            gradients: of each output; None is zero.
            trained: names of the parameters that need one; by default all.

        Returns:
            One for each input, None where nothing flows back; and by name of the parameters.
        """
        names = self.found.calls[index].inputs
        flows = [self.found.values[name].has_gradient for name in names]
        leaves = [_leaf(x) if flow else x for x, flow in zip(inputs, flows, strict=True)]
        parameters = _leaves(tensors, trained)
        with torch.enable_grad():
            outputs = self.block(index, parameters, leaves)
        return _gradients(outputs, gradients, leaves, flows, parameters)

    def prelude_backward(
        self,
        tensors: Tensors,
        batch: Batch,
        gradients: Sequence[torch.Tensor | None],
        trained: Collection[str] | None = None,
    ) -> dict[str, torch.Tensor | None]:
        """Gradients of the prelude's parameters, by running it again under autograd."""
        parameters = _leaves(tensors, trained)
        with torch.enable_grad():
            outputs = self.prelude(parameters, batch)
        return _gradients(outputs, gradients, [], [], parameters)[1]

    def postlude(self, tensors: Tensors, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Logits of a slice of R rows: [1, R, V] of tokens, whose values have B = 1 and S = R.

        The module runs whole, on the meta device until the last block.
        """
        names = self.found.postlude_inputs
        given = dict(zip(names, inputs, strict=True))
        axis = self.batches.row_axis(self.found.values[names[-1]].shape, self.found.size)

        def stub(index: int, _: Any) -> Any:
            call = self.found.calls[index]
            result = pytree.tree_map_only(torch.Tensor, _on_meta, call.result)
            for name, path in call.outputs.items():
                if name in given:
                    result = _replaced((result,), path, given[name])[0]
            return result

        with torch.device("meta"):
            batch = self.batches.rows_made(inputs[-1].shape[axis])
        with (
            self._stubbed(stub),
            self.batches.masks(batch),
            placed(self._hidden_buffers, self._meta_buffers),
            self._given(self._postlude_slots, tensors),
        ):
            return run_module(self.module, module_inputs(self.module, batch))

    def postlude_backward(
        self,
        tensors: Tensors,
        inputs: Sequence[torch.Tensor],
        labels: torch.Tensor,
        scale: float | torch.Tensor,
        trained: Collection[str] | None = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor | None], dict[str, torch.Tensor | None]]:
        """Loss of a slice of rows, and gradients of its inputs and of the parameters."""
        flows = [self.found.values[name].has_gradient for name in self.found.postlude_inputs]
        leaves = [_leaf(x) if flow else x for x, flow in zip(inputs, flows, strict=True)]
        parameters = _leaves(tensors, trained)
        with torch.enable_grad():
            loss = row_loss(self.postlude(parameters, leaves), labels, scale, self._own_loss)
        of_inputs, of_parameters = _gradients([loss], [None], leaves, flows, parameters)
        return loss.detach(), of_inputs, of_parameters

    def loss_of(
        self, logits: torch.Tensor, labels: torch.Tensor, scale: float | torch.Tensor
    ) -> torch.Tensor:
        """Return the loss of a slice of rows."""
        return row_loss(logits, labels, scale, self._own_loss)

    @contextmanager
    def _stubbed(self, stub: Any) -> Iterator[None]:
        """Blocks do nothing but hand their arguments to `stub`."""
        try:
            for index, call in enumerate(self.found.calls):
                call.module.forward = lambda *args, _i=index, **kwargs: stub(_i, (args, kwargs))
            yield
        finally:
            for call in self.found.calls:
                del call.module.forward

    @contextmanager
    def _given(self, slots: list[Slot], tensors: Tensors) -> Iterator[None]:
        """The tensors that are given are the module's; other buffers stay."""
        with placed([slot for slot in slots if slot[2] in tensors], tensors):
            yield

    def _filler(self, like: Any) -> torch.Tensor:
        """A tensor of a shape that nobody reads, of one element's memory."""
        key = Unread(tuple(like.shape), like.dtype)
        if key not in self._fillers:
            one = torch.zeros((), dtype=key.dtype, device=self.device)
            self._fillers[key] = one.expand(key.shape)
        return self._fillers[key]


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a leaf of a graph of its own, where it can have a gradient.

    Not `detach()`: that would count the writes of others into the arena that the tensor is a view
    of, and autograd would take them for changes of this tensor.
    """
    return tensor.data.requires_grad_(tensor.dtype.is_floating_point)


def _leaves(tensors: Tensors, trained: Collection[str] | None) -> dict[str, torch.Tensor]:
    return {
        name: _leaf(tensor) if trained is None or name in trained else tensor
        for name, tensor in tensors.items()
    }


def _gradients(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    inputs: Sequence[torch.Tensor],
    flows: Sequence[bool],
    parameters: Mapping[str, torch.Tensor],
) -> tuple[list[torch.Tensor | None], dict[str, torch.Tensor | None]]:
    roots = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if output.requires_grad and (gradient is not None or output.dim() == 0)
    ]
    wanted = [x for x, flow in zip(inputs, flows, strict=True) if flow]
    leaves = [*wanted, *(p for p in parameters.values() if p.requires_grad)]
    found: Iterator[torch.Tensor | None] = iter([None] * len(leaves))
    if roots:
        heads, seeds = zip(*roots, strict=True)
        found = iter(torch.autograd.grad(heads, leaves, seeds, allow_unused=True))
    of_inputs = [next(found) if flow else None for flow in flows]
    of_parameters = {
        name: next(found) if parameter.requires_grad else None
        for name, parameter in parameters.items()
    }
    return of_inputs, of_parameters


def _follow(path: Any, structure: Any) -> torch.Tensor:
    for step in path:
        structure = step.get(structure)
    assert isinstance(structure, torch.Tensor)
    return structure


def _replaced(structure: Any, path: Any, tensor: torch.Tensor) -> Any:
    """The structure with another tensor at a path."""
    leaves, spec = pytree.tree_flatten_with_path(structure)
    return pytree.tree_unflatten([tensor if at == path else leaf for at, leaf in leaves], spec)
