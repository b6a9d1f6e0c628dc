"""Traces a module into a document, by running its parts on tensors without memory."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from twinstream.executor.modules.adapters import is_adapter
from twinstream.executor.modules.batches import batches_of
from twinstream.executor.modules.blocks import OWN_LOSS, ModuleRefusal, told_of
from twinstream.executor.modules.calling import NoMemory
from twinstream.executor.modules.capture import (
    POSTLUDE,
    PRELUDE,
    Capture,
    CapturedValue,
    capture,
)
from twinstream.executor.modules.fitting import Size, fit, measured_sizes
from twinstream.executor.modules.grouping import (
    changed_buffers,
    groups_of,
    kind_key,
    state_groups,
)
from twinstream.executor.modules.module_program import ChunkProgram
from twinstream.executor.modules.operations import VECTOR, Amount, CountOperations, Key, TaskCost
from twinstream.executor.modules.positions.tables import built_for, position_limit
from twinstream.executor.modules.rows_and_values import check_own_loss
from twinstream.models.options import PositionLimit
from twinstream.models.providers.traced import ModuleSource, TracedModel
from twinstream.models.providers.traced_parts import (
    Peak,
    Poly,
    TracedBuffer,
    TracedCall,
    TracedKind,
    TracedPostlude,
    TracedPrelude,
    TracedTask,
    TracedValue,
    TracedWork,
)
from twinstream.schedule.errors import TwinstreamError

Shape = tuple[int, ...]
_GOOD_FIT = 0.01  # relative


def trace(
    source: ModuleSource,
    *,
    dtype: str = "bfloat16",
    attention: str | None = None,
    seq_len: int = 2048,
    is_packed: bool = False,
    longest: int | None = None,
) -> TracedModel:
    """Trace a model without weights: what it computes, moves and holds, for chunks of any size.

    Args:
        attention: eager or sdpa; None is sdpa where the class has it.
        seq_len: S that it will be used with; others are good from `min_seq_len` to `max_seq_len`.
        is_packed: whether chunks are one row of documents.
        longest: tokens of the longest of these, where that is known.

    Raises:
        ModuleRefusal: it cannot be planned; says where, why, and what to do.
    """
    packed_longest = longest if is_packed else None
    source, module = built_for(source, getattr(torch, dtype), attention, packed_longest)
    limit, notes = _positions(module)
    reach = None if limit is None or is_packed else limit.tokens
    sizes, low, high = measured_sizes(module, source, seq_len, is_packed, reach)
    found = capture(module, sizes[0], is_packed)
    if (own := getattr(module, OWN_LOSS, None)) is not None:
        check_own_loss(own, found.vocab_size)
    adapters = None
    if source.lora is not None:
        adapters = {name for name, _ in module.named_parameters() if is_adapter(name)}
    parts = _Parts(module, found, sizes, is_packed, adapters)
    try:
        parts.measure()
    except TwinstreamError:
        raise
    except Exception as error:
        raise ModuleRefusal(
            f"{type(module).__name__} fails with chunks of other sizes than the first, "
            f"{sizes[0]}: {told_of(error)}"
        ) from error
    config, changed = getattr(module, "config", None), changed_buffers(module, found)
    return TracedModel(
        name=getattr(config, "model_type", None) or type(module).__name__,
        model_type=getattr(config, "model_type", type(module).__name__),
        source=source,
        dtype=dtype,
        attention="eager" if getattr(config, "_attn_implementation", "") == "eager" else "sdpa",
        is_packed=is_packed,
        vocab_size=found.vocab_size,
        min_seq_len=low,
        max_seq_len=high,
        positions=limit,
        captured_size=sizes[0],
        num_parameters=sum(parameter.numel() for parameter in module.parameters()),
        **parts.described(),
        inputs=batches_of(module).inputs,
        buffers=tuple(
            TracedBuffer(
                name=name,
                shape=tuple(buffer.shape),
                dtype=_name(buffer.dtype),
                is_state=name in changed,
            )
            for name, buffer in module.named_buffers()
        ),
        has_randomness=bool(found.random_places),
        notes=tuple(dict.fromkeys((*notes, *parts.notes))),
        torch_version=torch.__version__,
        transformers_version=_transformers_version(source),
    )


def _positions(module: nn.Module) -> tuple[PositionLimit | None, list[str]]:
    """How many positions a module has, and what is to be said of it."""
    if hasattr(module, "seq_len"):  # sequences have one length
        return None, []
    if (labels := batches_of(module).labels) is not None:
        return PositionLimit(tokens=labels, why=f"a sample has {labels:,} of them, its labels"), []
    try:
        return position_limit(module), []
    except ModuleRefusal as error:
        return None, [f"how many positions it has is not known: {error}"]


class _Parts:
    """A module's prelude, kinds of blocks and postlude, measured at several sizes."""

    def __init__(
        self, module: nn.Module, found: Capture, sizes: list[Size], is_packed: bool,
        trained: set[str] | None,
    ) -> None:  # fmt: skip
        self.module, self.found, self.sizes, self.is_packed = module, found, sizes, is_packed
        self.notes: list[str] = []
        self.parameters = dict(module.named_parameters())
        self.trained = trained  # adapters, where there are some; None are all
        keys = [kind_key(module, found, index) for index in range(len(found.calls))]
        self.keys = list(dict.fromkeys(keys))
        self.kind_of = [self.keys.index(key) for key in keys]
        self.costs: dict[str, dict[Size, TaskCost]] = {}
        self.shapes: dict[str, dict[Size, Shape]] = {name: {} for name in found.values}

    def measure(self) -> None:
        """Run every part at every size, without memory."""
        first = ChunkProgram(
            self.module, self.found, is_packed=self.is_packed, device=torch.device("cpu")
        )
        for size in self.sizes:
            chunk = first.resized(size)
            with NoMemory():
                self._measure_prelude(chunk, size)
                outputs: dict[int, list[Shape]] = {}
                for index, kind in enumerate(self.kind_of):
                    if kind not in outputs:
                        outputs[kind] = self._measure_block(chunk, size, index)
                    for name, shape in zip(
                        self.found.calls[index].outputs, outputs[kind], strict=True
                    ):
                        chunk.set_shape(name, shape)
                for name, value in chunk.found.values.items():
                    self.shapes[name][size] = value.shape
        lengths = dict.fromkeys(seq_len for _, seq_len in self.sizes)
        few = range(1, 5) if first.batches.labels is None else range(2, 6)  # one repeats no copies
        for rows in lengths if len(lengths) > 1 else [times * min(lengths) for times in few]:
            try:
                with NoMemory():
                    self._measure_postlude(first, (1, rows))
            except RuntimeError as error:
                raise ModuleRefusal(
                    f"what comes after the blocks of {type(self.module).__name__} fails without "
                    "what comes before them: it may read what blocks are given and return; make "
                    f"what else it reads a block ({told_of(error)})"
                ) from error

    def _tensors(self, place: int) -> dict[str, torch.Tensor]:
        return {
            name: torch.empty_like(self.parameters[name], device="cpu")
            for name in sorted(self.found.used[place])
            if name in self.parameters
        }

    def _values(self, chunk: ChunkProgram, names: Sequence[str]) -> list[torch.Tensor]:
        described = [chunk.found.values[name] for name in names]
        return [torch.empty(value.shape, dtype=value.dtype) for value in described]

    def _note(self, task: str, size: Size, given: Any, run: Callable[[], Any]) -> Any:
        with torch.no_grad():
            cost, result = count_task(given, run)
        self.costs.setdefault(task, {})[size] = cost
        return result

    def _measure_prelude(self, chunk: ChunkProgram, size: Size) -> None:
        tensors = self._tensors(PRELUDE)
        batch = chunk.batches.made(size)
        made = self._note(
            "prelude", size, (tensors, dict(batch)), lambda: chunk.prelude(tensors, batch)
        )
        flows = [value for value in chunk.found.values.values() if value.source is not None]
        seeds = [
            torch.empty_like(x) if value.has_gradient else None
            for x, value in zip(made, flows, strict=True)
        ]
        if self.trained is not None:  # adapters are in blocks
            return
        given = (tensors, dict(batch), seeds)
        self._note(
            "prelude.backward", size, given, lambda: chunk.prelude_backward(tensors, batch, seeds)
        )

    def _measure_block(self, chunk: ChunkProgram, size: Size, index: int) -> list[Shape]:
        call, kind = self.found.calls[index], self.kind_of[index]
        tensors, inputs = self._tensors(index), self._values(chunk, call.inputs)
        outputs = self._note(
            f"{kind}", size, (tensors, inputs), lambda: chunk.block(index, tensors, inputs)
        )
        seeds = [
            torch.empty_like(x) if self.found.values[name].has_gradient else None
            for name, x in zip(call.outputs, outputs, strict=True)
        ]
        shapes = [tuple(x.shape) for x in outputs]
        del outputs
        self._note(
            f"{kind}.backward",
            size,
            (tensors, inputs, seeds),
            lambda: chunk.block_backward(index, tensors, inputs, seeds, self.trained),
        )
        return shapes

    def _measure_postlude(self, chunk: ChunkProgram, size: Size) -> None:
        tensors = self._tensors(POSTLUDE)
        names = self.found.postlude_inputs
        inputs = [self._rows(chunk, self.found.values[name], size[1]) for name in names]
        labels = torch.zeros(size[1], dtype=torch.int32)
        given = (tensors, inputs, labels)
        self._note(
            "postlude",
            size,
            given,
            lambda: chunk.loss_of(chunk.postlude(tensors, inputs), labels, 1.0),
        )
        self._note(
            "postlude.backward",
            size,
            given,
            lambda: chunk.postlude_backward(tensors, inputs, labels, 1.0, self.trained),
        )

    def _rows(self, chunk: ChunkProgram, value: CapturedValue, rows: int) -> torch.Tensor:
        """A slice of rows of a value."""
        batches = chunk.batches
        axis = batches.row_axis(value.shape, self.found.size)
        whole = batches.flat(torch.empty(value.shape, dtype=value.dtype), axis)
        shape = (*whole.shape[:axis], batches.places(rows), *whole.shape[axis + 1 :])
        return torch.empty(shape, dtype=value.dtype)

    def described(self) -> dict[str, Any]:
        """Fields of the document."""
        found = self.found
        groups = groups_of(self.module, found, self.trained or ())
        itemsize = next(self.module.parameters()).element_size()
        states = state_groups(self.module, found, itemsize)
        used = {
            place: tuple(name for name, (_, users) in groups.items() if place in users)
            for place in (*range(len(found.calls)), PRELUDE, POSTLUDE)
        }
        outside = tuple(name for name, value in found.values.items() if value.source is not None)
        return {
            "groups": (*(group for group, _ in groups.values()), *states.values()),
            "values": tuple(
                TracedValue(
                    name=name,
                    shape=tuple(
                        self._poly(f"the shape of {name}", {s: shapes[s][axis] for s in self.sizes})
                        for axis in range(len(value.shape))
                    ),
                    dtype=_name(value.dtype),
                    has_gradient=value.has_gradient,
                    layout=value.layout,
                )
                for name, value in found.values.items()
                for shapes in (self.shapes[name],)
            ),
            "kinds": tuple(
                TracedKind(
                    name=key[0],
                    forward=self._task(f"{kind}"),
                    backward=self._task(f"{kind}.backward"),
                )
                for kind, key in enumerate(self.keys)
            ),
            "prelude": TracedPrelude(
                forward=self._task("prelude"),
                groups=used[PRELUDE],
                outputs=outside,
                backward=self._task("prelude.backward")
                if "prelude.backward" in self.costs
                else None,
            ),
            "calls": tuple(
                TracedCall(
                    kind=self.kind_of[index],
                    groups=used[index],
                    inputs=call.inputs,
                    outputs=tuple(call.outputs),
                    state=(states[index].name,) if index in states else (),
                )
                for index, call in enumerate(found.calls)
            ),
            "postlude": TracedPostlude(
                training=self._task("postlude.backward"),
                evaluation=self._task("postlude"),
                groups=used[POSTLUDE],
                inputs=found.postlude_inputs,
            ),
        }

    def _task(self, task: str) -> TracedTask:
        costs = self.costs[task]
        # Kernels of one shape, by the order of their first call; or else all of a unit.
        shaped = {size: cost.of_shapes() for size, cost in costs.items()}
        units = {size: cost.of_units() for size, cost in costs.items()}
        aligned = len({tuple(key[:2] for key in found) for found in shaped.values()}) == 1
        works = []
        if aligned:
            for keys in zip(*shaped.values(), strict=True):
                of_size = dict(zip(shaped, keys, strict=True))
                each = {size: shaped[size][key] for size, key in of_size.items()}
                works.append(self._work(task, of_size, each))
        for key in dict.fromkeys(key for found in units.values() for key in found):
            if key[0] in VECTOR or not aligned:
                each = {size: found.get(key, Amount()) for size, found in units.items()}
                works.append(self._work(task, dict.fromkeys(each, key), each))
        return TracedTask(works=tuple(works), peak_bytes=self._peak(task, costs))

    def _peak(self, task: str, costs: dict[Size, TaskCost]) -> Peak:
        """Each moment is fitted by itself, where the task has the same ones at every size."""
        lengths = {len(cost.held_bytes) for cost in costs.values()}
        if lengths == {0} or len(lengths) > 1:
            peaks = {size: cost.peak_bytes for size, cost in costs.items()}
            return Peak(moments=(self._poly(f"the peak of {task}", peaks),))
        timelines = set(zip(*(cost.held_bytes for cost in costs.values()), strict=True))
        moments = [fit(dict(zip(costs, held, strict=True)))[0] for held in sorted(timelines)]
        asked = [*costs, *((b * f, s * f) for b, s in costs for f in (4, 32))]
        asked += [(b, s // 4 or 1) for b, s in costs]
        values = [[moment.at(*at) for moment in moments] for at in asked]
        peaking = dict.fromkeys(found.index(max(found)) for found in values)
        peak = Peak(moments=tuple(moments[index] for index in peaking))
        check = list(costs)[-1]
        error = abs(peak.at(*check) - costs[check].peak_bytes) / max(1, costs[check].peak_bytes)
        if error > _GOOD_FIT:
            self.notes.append(f"the peak of {task} is fitted to {error:.1%}")
        return peak

    def _work(self, task: str, keys: dict[Size, Key], each: dict[Size, Amount]) -> TracedWork:
        unit, dtype, shape = next(iter(keys.values()))

        def poly(what: str, values: dict[Size, int]) -> Poly:
            return self._poly(f"{what} of {unit} in {task}", values)

        rows = {
            size: amount.rows if unit in VECTOR else amount.rows // max(1, amount.launches)
            for size, amount in each.items()
        }
        rest = range(len(shape))
        return TracedWork(
            unit=unit,
            shape=(
                poly("rows", rows),
                *(poly("the shape", {s: key[2][i] for s, key in keys.items()}) for i in rest),
            ),
            flops=poly("FLOPs", {size: amount.flops for size, amount in each.items()}),
            hbm_bytes=poly("bytes", {size: amount.bytes_moved for size, amount in each.items()}),
            launches=poly("launches", {size: amount.launches for size, amount in each.items()}),
            dtype=dtype,
        )

    def _poly(self, what: str, values: dict[Size, int]) -> Poly:
        poly, error = fit(values)
        if error > _GOOD_FIT and not what.startswith("rows"):  # those are a mean of matrices
            self.notes.append(f"{what} is fitted to {error:.1%}")
        return poly


def count_task(given: Any, run: Callable[[], Any]) -> tuple[TaskCost, Any]:
    """What a task costs beyond the tensors that it is given, and its result."""
    counter = CountOperations()
    counter.given(given)
    with counter:
        result = run()
    return counter.cost, result


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _transformers_version(source: ModuleSource) -> str | None:
    if source.kind == "python":
        return None
    import transformers

    return transformers.__version__
