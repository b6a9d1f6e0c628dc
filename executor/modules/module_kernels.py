"""Kernels that run the parts of a traced module on operands of a schedule.

Bind time makes all views; a call runs the module's code on them, and copies what comes out into
the operands. Temporaries are torch's allocator's. Legend: B sequences of S tokens, R rows of a
slice of the B S rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from twinstream.executor.kernels.calls import Calls
from twinstream.executor.kernels.head_dpo import Pairs, write_pairs
from twinstream.executor.kernels.operand import Kernel, KernelOperand, Operands
from twinstream.executor.kernels.step_state import StepState
from twinstream.executor.kernels.vector.gradients import gradient_views, weight_views
from twinstream.executor.modules.batches import Batch
from twinstream.executor.modules.calling import drawing, evaluating, seed_for
from twinstream.executor.modules.module_program import ChunkProgram, ModuleProgram
from twinstream.executor.modules.rows_and_values import restored, row_losses, stored
from twinstream.models.kernel_costs.attributes import PLACES_A_ROUND, Attributes, typed_attribute
from twinstream.models.providers.traced_parts import TracedValue
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.ops import Mode

Views = Mapping[str, torch.Tensor]


def module_kernel(key: str, program_on: Callable[[torch.device], ModuleProgram]) -> Kernel:
    """The kernel of that key, which runs a part of a module.

    Raises:
        TwinstreamError: there is none of that name.
    """
    name = key.split("/")[0]
    if name not in _PARTS:
        raise TwinstreamError(f"kernel '{key}' is unknown; known: {', '.join(_PARTS)}")

    def bind(operands: Operands, attributes: Attributes) -> Calls:
        device = next(iter(operands.values())).bytes.device
        calls = Calls()
        _PARTS[name](_Bound(program_on(device), operands, attributes), calls)
        return calls

    return bind


class _Bound:
    """Views of a call's operands, and the program that works on them."""

    def __init__(self, program: ModuleProgram, operands: Operands, attributes: Attributes) -> None:
        self.model, self.operands, self.attributes = program.model, operands, attributes
        self.batch = typed_attribute(attributes, "batch", int)
        self.seq_len = typed_attribute(attributes, "seq_len", int)
        self.num_tokens = self.batch * self.seq_len
        self.chunk: ChunkProgram = program.at(self.batch, self.seq_len)
        self.dtype: torch.dtype = getattr(torch, self.model.dtype)
        self.tensors = {
            name: _own(view)
            for group, operand in self._by_group("parameters.")
            for name, view in weight_views(
                operand, self.model.group_layout(group), self.dtype
            ).items()
        }
        for buffer in self.model.buffers:
            if buffer.name in self.tensors and buffer.dtype != self.model.dtype:
                whole = self.tensors[buffer.name].view(getattr(torch, buffer.dtype))
                self.tensors[buffer.name] = whole.view(buffer.shape)
        self.evaluates = bool(attributes.get("evaluates", False))

    def _by_group(self, prefix: str) -> Iterator[tuple[str, KernelOperand]]:
        for name, operand in self.operands.items():
            if name.startswith(prefix):
                yield name.removeprefix(prefix), operand

    def inputs(self, names: Sequence[str]) -> list[torch.Tensor]:
        """The values in the operands input.0, input.1, ..., as they lay when they were made."""
        size = self.batch, self.seq_len
        return [
            restored(value, kept, size)
            for value, kept in zip(map(self.model.value, names), self._kept("input", names),
                                   strict=True)
        ]  # fmt: skip

    def outputs(self, names: Sequence[str]) -> list["_Output"]:
        """Where the operands output.0, output.1, ... take values."""
        values = map(self.model.value, names)
        return [_Output(*pair) for pair in zip(values, self._kept("output", names), strict=True)]

    def _kept(self, kind: str, names: Sequence[str]) -> list[torch.Tensor]:
        found = []
        for place, value in enumerate(map(self.model.value, names)):
            shape = value.stored_shape_at(self.batch, self.seq_len)
            operand = self.operands[f"{kind}.{place}"]
            found.append(_own(operand.view(getattr(torch, value.dtype), shape)))
        return found

    def gradients_of(self, kind: str, names: Sequence[str]) -> list[torch.Tensor | None]:
        """Gradients in the operands KIND.0, KIND.1, ...; None of those that are not there."""
        found: list[torch.Tensor | None] = []
        for place, value in enumerate(map(self.model.value, names)):
            operand = self.operands.get(f"{kind}.{place}")
            shape, dtype = value.shape_at(self.batch, self.seq_len), getattr(torch, value.dtype)
            found.append(None if operand is None else _own(operand.view(dtype, shape)))
        return found

    def contributions(self, names: Sequence[str]) -> list["_Contribution | None"]:
        """Where the gradients of inputs go."""
        views = self.gradients_of("d_input", names)
        return [
            None if view is None else _Contribution(view, self.operands[f"d_input.{place}"].mode)
            for place, view in enumerate(views)
        ]

    def gradients(self, calls: Calls) -> dict[str, "_Contribution"]:
        """Where the gradients of trained parameters go; calls zero the padding between them."""
        found: dict[str, _Contribution] = {}
        for group, operand in self._by_group("gradients."):
            layout = self.model.group_layout(group)
            views = gradient_views(operand, layout, self.attributes, calls)
            found |= {name: _Contribution(view, operand.mode) for name, view in views.items()}
        return found

    def fed(self) -> Callable[[], Batch]:
        """Makes the batch of what has been fed."""
        size = self.batch, self.seq_len
        return self.chunk.batches.fed(self.operands, self.attributes, size)

    def random(self) -> Callable[[], None] | None:
        """Seeds what follows by step, seed and place; None where nothing is drawn. Tokens and
        values are made once a round: their versions count rounds."""
        if "place" not in self.attributes:
            return None
        read = self.operands.get("input.0") or self.operands["tokens"]
        round_ = read.version - 1
        place = typed_attribute(self.attributes, "place", int)
        place += round_ * typed_attribute(self.attributes, PLACES_A_ROUND, int)
        return partial(seed_for, StepState(self.operands["step_state"].bytes), place)


@dataclass
class _Output:
    """Where a value is kept."""

    value: TracedValue
    kept: torch.Tensor

    def take(self, tensor: torch.Tensor) -> None:
        """Keep it as it lies."""
        self.kept.copy_(stored(self.value, tensor))


@dataclass
class _Contribution:
    """Where a gradient is written, or added to what is there."""

    view: torch.Tensor
    mode: Mode

    def take(self, gradient: torch.Tensor | None) -> None:
        """Take a gradient in; None is zero."""
        if gradient is None:
            if self.mode == "write":
                self.view.zero_()
        elif self.mode == "write":
            self.view.copy_(gradient)
        else:
            self.view.add_(gradient)


def _prelude(bound: _Bound, calls: Calls) -> None:
    chunk, tensors, fed, random = bound.chunk, bound.tensors, bound.fed(), bound.random()
    outputs = bound.outputs(bound.model.prelude.outputs)

    def run() -> None:
        with torch.no_grad(), drawing(random), evaluating(chunk.module, bound.evaluates):
            _copy(chunk.prelude(tensors, fed()), outputs)

    calls.add(run)


def _block(bound: _Bound, calls: Calls) -> None:
    chunk, tensors, random = bound.chunk, bound.tensors, bound.random()
    index = typed_attribute(bound.attributes, "block", int)
    call = bound.model.calls[index]
    inputs, outputs = bound.inputs(call.inputs), bound.outputs(call.outputs)

    def run() -> None:
        module = chunk.found.calls[index].module
        with torch.no_grad(), drawing(random), evaluating(module, bound.evaluates):
            _copy(chunk.block(index, tensors, inputs), outputs)

    calls.add(run)


def _block_backward(bound: _Bound, calls: Calls) -> None:
    chunk, tensors, random = bound.chunk, bound.tensors, bound.random()
    index = typed_attribute(bound.attributes, "block", int)
    call = bound.model.calls[index]
    inputs, d_outputs = bound.inputs(call.inputs), bound.gradients_of("d_output", call.outputs)
    d_inputs, gradients = bound.contributions(call.inputs), bound.gradients(calls)

    def run() -> None:
        with drawing(random), evaluating(chunk.module, bound.evaluates):
            of_inputs, of_parameters = chunk.block_backward(
                index, tensors, inputs, d_outputs, gradients.keys()
            )
        for place, gradient in zip(d_inputs, of_inputs, strict=True):
            if place is not None:
                place.take(gradient)
        _take(gradients, of_parameters)

    calls.add(run)


def _prelude_backward(bound: _Bound, calls: Calls) -> None:
    chunk, tensors, fed, random = bound.chunk, bound.tensors, bound.fed(), bound.random()
    d_outputs = bound.gradients_of("d_output", bound.model.prelude.outputs)
    gradients = bound.gradients(calls)

    def run() -> None:
        with drawing(random), evaluating(chunk.module, bound.evaluates):
            found = chunk.prelude_backward(tensors, fed(), d_outputs, gradients.keys())
        _take(gradients, found)

    calls.add(run)


class _Rows:
    """The postlude's inputs and labels, a slice of rows after the other."""

    def __init__(self, bound: _Bound) -> None:
        self.size = typed_attribute(bound.attributes, "row_slice", int)
        self.starts = range(0, bound.num_tokens, self.size)
        names, self.batches = bound.model.postlude.inputs, bound.chunk.batches
        shapes, size = bound.chunk.found.values, bound.chunk.found.size
        self.axes = [self.batches.row_axis(shapes[name].shape, size) for name in names]
        self.inputs = self.flat(bound.inputs(names))
        fed = bound.operands["tokens"].view(torch.int32, (2, bound.num_tokens))
        self.labels = _own(fed[1])
        self.loss_scale = _own(StepState(bound.operands["step_state"].bytes).loss_scale[0])
        self.loss = _Contribution(
            bound.operands["loss"].view(torch.float32, (1,)), bound.operands["loss"].mode
        )

    def flat(self, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Inputs, or their gradients, with rows along one axis."""
        return [self.batches.flat(view, axis) for axis, view in zip(self.axes, views, strict=True)]

    def of(self, start: int, place: int, flat: torch.Tensor) -> torch.Tensor:
        """The rows of a slice, of one of the flat inputs or of its gradient."""
        first, count = self.batches.places(start), self.batches.places(self.size)
        return flat.narrow(self.axes[place], first, count)

    def inputs_of(self, start: int) -> list[torch.Tensor]:
        """The rows of a slice, of all inputs."""
        return [self.of(start, place, flat) for place, flat in enumerate(self.inputs)]

    def flat_contributions(
        self, places: Sequence["_Contribution | None"]
    ) -> list["_Contribution | None"]:
        """Where the gradients of the flat inputs go."""
        return [
            None
            if place is None
            else _Contribution(self.batches.flat(place.view, axis), place.mode)
            for axis, place in zip(self.axes, places, strict=True)
        ]

    def labels_of(self, start: int) -> torch.Tensor:
        """The labels of a slice."""
        return self.labels[start : start + self.size]


def _head_loss(bound: _Bound, calls: Calls) -> None:
    rows = _Rows(bound)
    backward = _head_backward(bound, rows, calls)
    calls.add(lambda: rows.loss.take(backward(rows.loss_scale)))


def _head_dpo(bound: _Bound, calls: Calls) -> None:
    """The loss of pairs, by two passes over the rows (`kernels.head_dpo`)."""
    rows = _Rows(bound)
    backward = _head_backward(bound, rows, calls)
    calls.add(lambda: backward(_pair_scales(bound, rows)))


def _head_backward(
    bound: _Bound, rows: _Rows, calls: Calls
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Writes or adds the gradients of inputs and parameters, by what the loss of a row counts: one
    number, or of each row; gives the loss."""
    chunk, tensors = bound.chunk, bound.tensors
    d_inputs = bound.contributions(bound.model.postlude.inputs)
    flat_gradients = rows.flat_contributions(d_inputs)
    gradients = bound.gradients(calls)

    def backward(scale: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(rows.loss.view)
        for start in rows.starts:
            of_rows = scale[start : start + rows.size] if scale.dim() else scale
            given = tensors, rows.inputs_of(start), rows.labels_of(start), of_rows
            with evaluating(chunk.module, bound.evaluates):
                loss, of_inputs, of_parameters = chunk.postlude_backward(*given, gradients.keys())
            total += loss
            for number, (place, gradient) in enumerate(zip(flat_gradients, of_inputs, strict=True)):
                if place is not None:
                    part = rows.of(start, number, place.view)
                    _Contribution(part, place.mode).take(gradient)
            _take(gradients, of_parameters, "update" if start else None)
        return total

    return backward


def _pair_scales(bound: _Bound, rows: _Rows) -> torch.Tensor:
    """Writes log-probabilities and loss of pairs; what each row's loss counts then, [T]."""
    losses_T = torch.empty(bound.num_tokens, device=rows.labels.device)
    with torch.no_grad(), evaluating(bound.chunk.module, bound.evaluates):
        for start in rows.starts:
            logits = bound.chunk.postlude(bound.tensors, rows.inputs_of(start))
            losses_T[start : start + rows.size] = row_losses(logits, rows.labels_of(start))
        take = partial(torch.empty, device=losses_T.device)
        pairs = Pairs.of(
            bound.num_tokens, rows.loss_scale.view(1),
            lambda shape, dtype: take(shape, dtype=dtype), bound.operands, bound.attributes,
        )  # fmt: skip
        write_pairs(pairs, losses_T)
    return pairs.scales


def _head_evaluate(bound: _Bound, calls: Calls) -> None:
    chunk, tensors, rows = bound.chunk, bound.tensors, _Rows(bound)
    take = _row_results(bound, rows)

    def run() -> None:
        total = torch.zeros_like(rows.loss.view)
        with torch.no_grad(), evaluating(chunk.module, bound.evaluates):
            for start in rows.starts:
                logits = chunk.postlude(tensors, rows.inputs_of(start))
                total += chunk.loss_of(logits, rows.labels_of(start), rows.loss_scale)
                take(start, logits)
        rows.loss.take(total)

    calls.add(run)


def _row_results(bound: _Bound, rows: _Rows) -> Callable[[int, torch.Tensor], None]:
    """Keeps what is asked for of a slice of rows: log-probabilities, logits or nothing."""
    tokens, vocab = bound.num_tokens, bound.model.vocab_size

    def kept(name: str, *shape: int) -> torch.Tensor | None:
        operand = bound.operands.get(name)
        return None if operand is None else operand.view(torch.float32, shape)

    log_probs_T, logits_TV = kept("log_probs", tokens), kept("logits", tokens, vocab)

    def take(start: int, logits: torch.Tensor) -> None:
        part = slice(start, start + rows.size)
        if log_probs_T is not None:
            log_probs_T[part].copy_(row_losses(logits, rows.labels_of(start))).neg_()
        if logits_TV is not None:
            logits_TV[part].copy_(logits.reshape(-1, vocab))

    return take


def _head_dpo_evaluate(bound: _Bound, calls: Calls) -> None:
    rows = _Rows(bound)
    calls.add(lambda: _pair_scales(bound, rows))


_PARTS: Mapping[str, Callable[[_Bound, Calls], None]] = {
    "module_prelude": _prelude,
    "module_block": _block,
    "module_block_backward": _block_backward,
    "module_prelude_backward": _prelude_backward,
    "module_head_loss": _head_loss,
    "module_head_evaluate": _head_evaluate,
    "module_head_dpo": _head_dpo,
    "module_head_dpo_evaluate": _head_dpo_evaluate,
}


def _own(view: torch.Tensor) -> torch.Tensor:
    """The same memory, for which autograd does not count others' writes into the arena."""
    return view.data


def _copy(made: Sequence[torch.Tensor], outputs: Sequence["_Output"]) -> None:
    for tensor, output in zip(made, outputs, strict=True):
        output.take(tensor)


def _take(
    gradients: Mapping[str, _Contribution], found: Mapping[str, torch.Tensor | None],
    mode: Mode | None = None,
) -> None:  # fmt: skip
    for name, place in gradients.items():
        _Contribution(place.view, mode or place.mode).take(found.get(name))
