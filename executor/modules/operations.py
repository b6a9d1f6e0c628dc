"""What a task's operations do: FLOPs, bytes, launches by kind, and the peak of its temporaries."""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten
_SUMS = {aten.sum, aten.mean}
_NARROW_ROW = 32
_FREE = {
    *(aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided),
    *(aten.detach, aten.lift_fresh, aten._local_scalar_dense, aten.is_same_size),
}
_PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm}
VECTOR = ("vector", "vector_narrow")  # units whose operations are added up, whatever their shapes
Key = tuple[str, str, tuple[int, ...]]  # unit, dtype, what of the shape is not rows


@dataclass
class Amount:
    """Like operations, summed. `rows` is the M of all of them."""

    rows: int = 0
    flops: int = 0
    bytes_moved: int = 0
    launches: int = 0

    def add(self, other: "Amount") -> None:
        """Take the other into the sum."""
        self.rows += other.rows
        self.flops += other.flops
        self.bytes_moved += other.bytes_moved
        self.launches += other.launches


@dataclass
class TaskCost:
    """What a task did: amounts by kind of operation, in order of the first, and bytes held.

    `held_bytes` are those after each operation that makes a tensor.
    """

    amounts: dict[Key, Amount] = field(default_factory=dict)
    held_bytes: list[int] = field(default_factory=list)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were held at once."""
        return max(self.held_bytes, default=0)

    @property
    def flops(self) -> int:
        """FLOPs of all operations."""
        return sum(amount.flops for amount in self.amounts.values())

    def of_shapes(self) -> dict[Key, Amount]:
        """Amounts of all but vector work."""
        return {key: amount for key, amount in self.amounts.items() if key[0] not in VECTOR}

    def of_units(self) -> dict[Key, Amount]:
        """Amounts by unit and dtype alone."""
        found: dict[Key, Amount] = {}
        for (unit, dtype, _), amount in self.amounts.items():
            found.setdefault((unit, dtype, ()), Amount()).add(amount)
        return found


class CountOperations(TorchDispatchMode):
    """Counts the operations that run while it holds, on real tensors or fake ones.

    What the allocator holds is told by the lives of storages: those that are made while it holds
    count from the operation that makes them to the death of the last tensor that has them.
    Workspaces inside a kernel are not seen. Tensors of the meta device cost nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cost = TaskCost()
        self._held_bytes = 0
        self._known: dict[int, Any] = {}  # weak references to storages

    def given(self, structure: Any) -> None:
        """Tensors that were there before, which are nobody's temporaries."""
        for tensor in _tensors(structure):
            self._hold(tensor, counts=False)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        for tensor in inputs:
            self._hold(tensor, counts=False)
        out = func(*args, **kwargs)
        outputs = _tensors(out)
        views = {id(tensor.untyped_storage()) for tensor in inputs}
        writes = func._schema.is_mutable
        if not writes and outputs and all(id(t.untyped_storage()) in views for t in outputs):
            return out
        for tensor in outputs:
            self._hold(tensor, counts=True)
        self.cost.held_bytes.append(self._held_bytes)
        on_meta = bool(outputs) and all(tensor.device.type == "meta" for tensor in outputs)
        if func.overloadpacket not in _FREE and outputs and not on_meta:
            self._count(func, args, kwargs, inputs, outputs)
        return out

    def _hold(self, tensor: torch.Tensor, *, counts: bool) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known:
            return
        size = storage.nbytes() if counts and tensor.device.type != "meta" else 0

        def died(_: Any) -> None:
            del self._known[key]
            self._held_bytes -= size

        self._known[key] = weakref.ref(storage, died)
        self._held_bytes += size

    def _count(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> None:
        unit, rows, rest, flops = _work_of(func, args, kwargs, outputs)
        dtype = str(outputs[0].dtype).removeprefix("torch.")
        amount = self.cost.amounts.setdefault((unit, dtype, rest), Amount())
        amount.rows += rows
        amount.flops += flops
        amount.bytes_moved += sum(_bytes(tensor) for tensor in (*inputs, *outputs))
        amount.launches += 1


def _work_of(
    func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]
) -> tuple[str, int, tuple[int, ...], int]:
    """Unit, rows, rest of the shape, and FLOPs of an operation."""
    packet, out = func.overloadpacket, outputs[0]
    if packet in _PRODUCTS:
        left, right = [x for x in args if isinstance(x, torch.Tensor)][-2:]
        rows, depth, columns = left.numel() // left.shape[-1], left.shape[-1], right.shape[-1]
        return "matmul", rows, (columns, depth), 2 * rows * depth * columns
    if packet is aten._grouped_mm:
        return _grouped(args, kwargs)
    if "scaled_dot_product" in str(packet) and "attention" in str(packet):
        return _attention(func, args, kwargs)
    if packet is aten.convolution_backward:
        return "convolution", sum(x.numel() for x in outputs), (), _convolution_backward(args)
    if packet in flop_registry:
        flops = flop_registry[packet](
            *args, **kwargs, out_val=out if len(outputs) == 1 else outputs
        )
        return "convolution", out.numel(), (), int(flops)
    narrow = _is_narrow(func, args, kwargs, out)
    return "vector_narrow" if narrow else "vector", out.numel(), (), 0


def _is_narrow(func: Any, args: Any, kwargs: Any, out: torch.Tensor) -> bool:
    """Whether it goes through rows of few elements: repeats something along them, or sums them up.

    On a CPU that takes several times as long for each byte.
    """
    if torch.Tag.pointwise not in func.tags and func.overloadpacket not in _SUMS:
        return False
    tensors = [tensor for tensor in (*_tensors((args, kwargs)), out) if tensor.dim()]
    largest = max(tensors, key=torch.Tensor.numel, default=out)
    if not largest.dim() or largest.shape[-1] >= _NARROW_ROW:
        return False
    return any(1 < tensor.numel() < largest.numel() for tensor in tensors)


def _convolution_backward(args: Any) -> int:
    """Of each product what forward has, groups included: torch's own count leaves them out."""
    gradient, x, weight = args[:3]
    transposed, masks = args[7], args[-1]
    positions = (x if transposed else gradient).numel()
    products = int(masks[0]) + int(masks[1])
    return int(2 * positions * weight[0].numel() * products)


def _grouped(args: Any, kwargs: Any) -> tuple[str, int, tuple[int, ...], int]:
    left, right = args[0], args[1]
    offsets = args[2] if len(args) > 2 else kwargs["offs"]
    groups = offsets.shape[0]
    if left.dim() == 2 and right.dim() == 2:  # [M, rows] x [rows, N]: gradients of weights
        rows, columns, depth = right.shape[0], right.shape[1], left.shape[0]
    else:
        rows, columns, depth = left.shape[0], right.shape[-1], left.shape[-1]
    return "grouped_matmul", rows, (columns, depth, groups), 2 * rows * columns * depth


def _attention(func: Any, args: Any, kwargs: Any) -> tuple[str, int, tuple[int, ...], int]:
    """Half of the scores of causal attention count."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, value = given["query"], given["key"], given["value"]
    batch, heads, queries, width = query.shape
    shapes = (query.shape, key.shape, value.shape)
    if "backward" in names or "grad_out" in names or "grad_out_" in names:
        gradient = given["grad_out" if "grad_out" in given else "grad_out_"]
        unit, flops = "attention_backward", sdpa_backward_flop_count(gradient.shape, *shapes)
    else:
        unit, flops = "attention_forward", sdpa_flop_count(*shapes)
    if given.get("is_causal") and queries == key.shape[2]:
        flops //= 2
    return unit, queries, (key.shape[2], heads, width, batch), int(flops)


def _tensors(structure: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(structure) if isinstance(leaf, torch.Tensor)]


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes that are moved of a tensor: of what is expanded, what is there."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
