"""Runs a module once on tensors without memory, and notes by identity what its blocks read.

A value is a tensor that blocks or the postlude read: made before the blocks (or between them, of
nothing that a block made), or by a block. Arguments of a block are flattened, containers that
blocks write into included; tensors that no operation of the block touches are no inputs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from twinstream.executor.modules.batches import batches_of
from twinstream.executor.modules.blocks import (
    ModuleRefusal,
    blocks_of,
    told_of,
    what_a_newer_does,
)
from twinstream.executor.modules.building import buffer_slots, parameter_slots, placed
from twinstream.executor.modules.calling import (
    NEVER,
    NoMemory,
    flatten_dictionaries,
    module_inputs,
    run_module,
)
from twinstream.schedule.errors import TwinstreamError

Path = tuple[Any, ...]
PRELUDE, POSTLUDE = -1, -2  # places beside a block's number


@dataclass(frozen=True)
class Unread:
    """A tensor among a block's arguments that the block does not read, only its shape."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Read:
    """A tensor among a block's arguments: which of its inputs."""

    index: int


@dataclass
class CapturedCall:
    """The call of one block.

    `leaves` are the flattened (args, kwargs): `Read`, `Unread`, or a constant. `outputs` are names
    of values and where they are found after the call: a path in (result, args, kwargs).
    """

    module: nn.Module
    spec: pytree.TreeSpec
    leaves: list[Any]
    inputs: tuple[str, ...]
    outputs: dict[str, Path]
    result: Any = None  # the returned structure, with (shape, dtype) in place of tensors


@dataclass(frozen=True)
class CapturedValue:
    """What a value is in the captured chunk. A prelude's has (block, path in (args, kwargs))."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool
    source: tuple[int, Path] | None
    layout: tuple[int, ...] = ()


@dataclass
class Capture:
    """What one run of a module showed."""

    calls: list[CapturedCall] = field(default_factory=list)
    values: dict[str, CapturedValue] = field(default_factory=dict)
    size: tuple[int, int] = (0, 0)  # B, S
    used: dict[int, set[str]] = field(default_factory=dict)  # parameters and buffers, by place
    postlude_modules: set[int] = field(default_factory=set)  # ids of what the postlude calls
    postlude_inputs: tuple[str, ...] = ()
    random_places: set[int] = field(default_factory=set)
    changed_buffers: tuple[str, ...] = ()
    vocab_size: int = 0
    num_operations: int = 0

    def structure(self) -> list[Any]:
        """What two captures of a module whose graph stays have in common."""
        return [
            (
                call.spec,
                [leaf for leaf in call.leaves if isinstance(leaf, Read)],
                call.inputs,
                call.outputs,
            )
            for call in self.calls
        ]


def capture(
    module: nn.Module, size: tuple[int, int], is_packed: bool = False, *, once: bool = False
) -> Capture:
    """Capture a run on a chunk of (B, S) tokens; unless `once`, two, which must agree.

    Raises:
        ModuleRefusal: it cannot be run block by block; names the place and the reason.
    """
    first = _capture(module, size, is_packed, NEVER)
    if not once:
        try:
            same = first.structure() == _capture(module, size, is_packed, 0.0).structure()
        except ModuleRefusal:
            same = False
        if not same:
            raise ModuleRefusal(
                f"{type(module).__name__} drops layers at random, or does something else in each "
                "run: set layerdrop to 0 in its config"
            )
    return first


def _capture(module: nn.Module, size: tuple[int, int], is_packed: bool, coin: float) -> Capture:
    watch = _Watch(module, coin)
    mode = NoMemory()
    slots, buffers = parameter_slots(module), buffer_slots(module)
    with mode:
        fakes = {
            name: torch.empty(place[key].shape, dtype=place[key].dtype).requires_grad_(
                place[key].dtype.is_floating_point
            )
            for place, key, name in slots
        }
        fake_buffers = {name: torch.empty_like(place[key]) for place, key, name in buffers}
        batches = batches_of(module, is_packed)
        batch = batches.made(size)
    everything = {**fakes, **fake_buffers}
    watch.names = {id(tensor): name for name, tensor in everything.items()}
    versions = {name: tensor._version for name, tensor in fake_buffers.items()}
    with (
        placed(slots, fakes),
        placed(buffers, fake_buffers),
        mode,
        batches.masks(batch),
    ):
        with watch.blocks_watched(), watch:
            try:
                logits = run_module(module, module_inputs(module, batch))
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise ModuleRefusal(
                    f"{watch.where()} calls {error.func}, whose result depends on the values of "
                    "tensors, so that its memory and time are not known before: it cannot be "
                    f"planned{what_a_newer_does()}"
                ) from None
            except TwinstreamError:
                raise
            except Exception as error:
                raise ModuleRefusal(f"{watch.where()} fails: {told_of(error)}") from error
        if (why := batches.logits_refusal(shape := tuple(logits.shape), size)) is not None:
            raise ModuleRefusal(f"{type(module).__name__} makes logits of shape {shape} {why}")
        found = watch.finish(logits)
    found.size = size
    found.changed_buffers = tuple(
        name for name, tensor in fake_buffers.items() if tensor._version != versions[name]
    )
    return found


class _Watch(TorchDispatchMode):
    """Notes which operation of which place reads what."""

    def __init__(self, module: nn.Module, coin: float) -> None:
        super().__init__()
        self.module, self.coin = module, coin
        self.list_name, self.blocks = blocks_of(module)
        self.place = PRELUDE
        self.names: dict[int, str] = {}  # of parameters
        self.found = Capture()
        self.read: dict[int, set[int]] = {}  # ids of tensors, by place
        self.known: dict[int, str] = {}  # values by id of the tensor
        self.tensors: list[Any] = []  # so that no id is used again
        self.tainted: set[int] = set()  # ids of tensors that follow from a block's outputs
        self.arguments: list[tuple[list[Any], list[Any], pytree.TreeSpec, dict[int, str]]] = []
        self.pending: dict[int, tuple[int, Path]] = {}
        self.makers: dict[int, tuple[int, Path]] = {}  # of tensors that blocks made
        self.called: dict[int, int] = {}

    def where(self) -> str:
        kind = type(self.module).__name__
        if self.place >= 0:
            return f"block {self.place} of {kind} ({type(self.blocks[self.place]).__name__})"
        return f"{kind} {'before its blocks' if self.place == PRELUDE else 'after its blocks'}"

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.rand.default and not list(args[0]):
            return torch.tensor(self.coin)  # a decision of the graph, not of numbers
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
            self.found.random_places.add(self.place)
        self.found.num_operations += 1
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        read = self.read.setdefault(self.place, set())
        used = self.found.used.setdefault(self.place, set())
        for tensor in tensors:
            read.add(id(tensor))
            if id(tensor) in self.names:
                used.add(self.names[id(tensor)])
        out = func(*args, **kwargs)
        if self.place < 0 and any(id(tensor) in self.tainted for tensor in tensors):
            for tensor in pytree.tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    self.tainted.add(id(tensor))
                    self.tensors.append(tensor)
        return out

    @contextmanager
    def blocks_watched(self) -> Iterator[None]:
        handle = nn.modules.module.register_module_forward_pre_hook(self._note_module)
        forwards = [block.forward for block in self.blocks]
        try:
            for index, block in enumerate(self.blocks):
                block.forward = self._watched(index, forwards[index])
            yield
        finally:
            handle.remove()
            for block in self.blocks:
                del block.forward

    def _note_module(self, module: nn.Module, _: Any) -> None:
        if self.place == POSTLUDE:
            self.found.postlude_modules.add(id(module))
        self.called.setdefault(id(module), self.place)

    def _watched(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if index != len(self.found.calls):
                raise self._order_refusal(index)
            self.place = index
            flatten_dictionaries((args, kwargs))
            before, spec = pytree.tree_flatten_with_path((args, kwargs))
            versions = [
                leaf._version if isinstance(leaf, torch.Tensor) else 0 for _, leaf in before
            ]
            self.tensors.extend(leaf for _, leaf in before)
            result = forward(*args, **kwargs)
            flatten_dictionaries((result, args, kwargs))
            for (path, leaf), version in zip(before, versions, strict=True):
                if isinstance(leaf, torch.Tensor) and leaf._version != version:
                    raise ModuleRefusal(
                        f"{self.where()} writes into its argument {pytree.keystr(path)}: blocks "
                        "may only make new tensors"
                    )
                self._require_plain(path, leaf)
            self._note_call(index, before, spec, result, args, kwargs)
            self.place = POSTLUDE if index + 1 == len(self.blocks) else PRELUDE
            return result

        return run

    def _require_plain(self, path: Path, leaf: Any) -> None:
        """An object of a class of its own may not carry tensors from block to block."""
        if isinstance(leaf, torch.Tensor | type) or not hasattr(leaf, "__dict__"):
            return
        if any(isinstance(held, torch.Tensor) for held in pytree.tree_leaves(vars(leaf))):
            raise ModuleRefusal(
                f"{self.where()} has tensors in its argument {pytree.keystr(path)} of class "
                f"{type(leaf).__name__}: blocks may hand on tensors, tuples, lists and dictionaries"
            )

    def _order_refusal(self, index: int) -> ModuleRefusal:
        calls = len(self.found.calls)
        what = (
            f"calls block {index} again after block {calls - 1}: a loop over blocks"
            if index < calls
            else f"calls block {index} after block {calls - 1}, and leaves out those between"
        )
        return ModuleRefusal(
            f"{type(self.module).__name__} {what} cannot be planned; each block must be called "
            "once, in order"
        )

    def _note_call(
        self,
        index: int,
        before: list[Any],
        spec: pytree.TreeSpec,
        result: Any,
        args: Any,
        kwargs: Any,
    ) -> None:
        read = self.read.get(index, set())
        inputs: list[str] = []
        leaves: list[Any] = []
        returned = {id(leaf) for leaf in pytree.tree_leaves(result)}
        for path, leaf in before:
            if not isinstance(leaf, torch.Tensor):
                leaves.append(leaf)
            elif id(leaf) in read or id(leaf) in returned:
                name = self._name(index, path, leaf)
                if name not in inputs:
                    inputs.append(name)
                leaves.append(Read(inputs.index(name)))
            else:
                leaves.append(Unread(tuple(leaf.shape), leaf.dtype))
        known = {id(leaf) for _, leaf in before}
        after, _ = pytree.tree_flatten_with_path((result, args, kwargs))
        for path, leaf in after:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in known:
                self.makers.setdefault(id(leaf), (index, path))
                self.tainted.add(id(leaf))
                self.tensors.append(leaf)
        self.found.calls.append(
            CapturedCall(
                module=self.blocks[index],
                spec=spec,
                leaves=leaves,
                inputs=tuple(inputs),
                outputs={},
                result=result,
            )
        )

    def _name(self, index: int, path: Path, tensor: torch.Tensor) -> str:
        """The value that a tensor is, made known if it is read for the first time."""
        if (name := self.known.get(id(tensor))) is not None:
            return name
        source: tuple[int, Path] | None = (index, path)
        if (maker := self.makers.get(id(tensor))) is not None:
            block, where = maker
            outputs = self.found.calls[block].outputs
            name = f"block.{block}.{len(outputs)}"
            outputs[name] = where
            source = None
        elif id(tensor) in self.tainted:
            raise ModuleRefusal(
                f"{type(self.module).__name__} computes {pytree.keystr(path)} of block {index} "
                "between its blocks of what earlier blocks made: put that into a block"
            )
        else:
            count = sum(value.source is not None for value in self.found.values.values())
            name = f"prelude.{count}"
        self.found.values[name] = CapturedValue(
            tuple(tensor.shape), tensor.dtype, tensor.requires_grad, source, layout_of(tensor)
        )
        self.known[id(tensor)] = name
        return name

    def finish(self, logits: torch.Tensor) -> Capture:
        found = self.found
        if len(found.calls) != len(self.blocks):
            raise ModuleRefusal(
                f"{type(self.module).__name__} called {len(found.calls)} of the "
                f"{len(self.blocks)} blocks of its list '{self.list_name}'"
            )
        read = self.read.get(POSTLUDE, set())
        found.postlude_inputs = tuple(
            self._name(POSTLUDE, (), tensor)
            for tensor in {id(t): t for t in self.tensors if isinstance(t, torch.Tensor)}.values()
            if id(tensor) in read and (id(tensor) in self.makers or id(tensor) in self.known)
        )
        for place in (*range(len(self.blocks)), PRELUDE, POSTLUDE):
            found.used.setdefault(place, set())
        found.vocab_size = logits.shape[-1]
        return found


def layout_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its axes in the order of memory without repeated ones; empty for row by row."""
    strides = tensor.stride()
    axes = [a for a, stride in enumerate(strides) if stride > 0 or tensor.shape[a] == 1]
    if tensor.is_contiguous() or not axes:
        return ()
    return tuple(sorted(axes, key=lambda axis: (-strides[axis], axis)))


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation really draws random numbers: attention does only with dropout."""
    if "scaled_dot_product" not in str(func):
        return True
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return bool(given.get("dropout_p", 0.0))
