"""The layers of a virtual stage, forward and backward, with their parameters gathered ahead."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Literal

from twinstream.models.layouts.job import Job
from twinstream.models.layouts.kernels import times
from twinstream.models.lowering.parts.builder import Buffer, Ends, StageBuilder, Use
from twinstream.models.lowering.parts.layer_chain import LayerChain, LayerEmitter
from twinstream.models.lowering.parts.layer_parts import CollectiveElement, LayerParts, layer_parts
from twinstream.models.lowering.parts.weights import StageWeights
from twinstream.schedule.cost import Work


class LayerOps:
    """Emits chunks of layers. `alone`: each layer has ops of its own, whatever the microbatch."""

    def __init__(
        self, builder: StageBuilder, job: Job, weights: StageWeights, *, folded: bool = False
    ) -> None:
        self._b, self._job, self._weights = builder, job, weights
        self._parts: dict[int, LayerParts] = {}
        self._emitters: dict[int, PlainLayers | LayerChain] = {}
        for kind in sorted(set(map(job.shape.kind_of, range(job.shape.num_layers)))):
            own = job.of_kind(kind)
            parts = self._parts[kind] = layer_parts(own)
            if folded:
                parts = self._parts[kind] = replace(parts, plain=True)
            made = PlainLayers if parts.plain else LayerChain
            self._emitters[kind] = made(builder, own, parts, weights, kind_name(kind))
        first = next(iter(self._parts.values()))  # kinds are alike in what is asked of it
        self._zero_bubble = job.layout.pipeline == "zero_bubble"
        scattered = job.layout.zero >= 2  # so that few layers' gradients are whole at a time
        self.alone = not first.plain or scattered or job.layout.offload
        self._input_bytes = first.input_bytes

    def forward(
        self, span: range, chunk: int, j: int, source: Buffer, target: Buffer, *, fine: bool
    ) -> None:
        """Go from a chunk's input to its output; what backward needs stays."""
        if not span:
            self._pass_on(f"forward.none{chunk}.{j}", source, target, "layer_forward", j)
        units = self._units(span, fine=fine)
        for unit, given, out in self._walk(units, f"f{chunk}.{j}", source, target):
            self._emitter(unit).forward(unit, j, given, out, first=unit[0] == span[0])

    def backward(
        self, span: range, chunk: int, j: int, ends: Ends, *, fine: bool, last: bool
    ) -> None:
        """Go from the gradient of a chunk's output to that of its input."""
        entered, gradient, target = ends
        if not span:
            self._pass_on(f"backward.none{chunk}.{j}", gradient, target, "layer_backward", j)
        units = self._units(span, fine=fine)[::-1]
        for unit, given, out in self._walk(units, f"b{chunk}.{j}", gradient, target):
            self._emitter(unit).backward(unit, j, (entered, given, out), first=unit[0] == span[0])
            if not self._zero_bubble:
                self._after_backward(unit, f"{chunk}.{j}", last=last)

    def weight(
        self, span: range, chunk: int, j: int, entered: Buffer, *, fine: bool, last: bool
    ) -> None:
        """Make the gradients of weights that backward has put off."""
        for unit in self._units(span, fine=fine)[::-1]:
            self._emitter(unit).weight(unit, j, entered)
            self._after_backward(unit, f"{chunk}.{j}", last=last)

    def _emitter(self, unit: Sequence[int]) -> "PlainLayers | LayerChain":
        return self._emitters[self._job.shape.kind_of(unit[0])]

    def _units(self, span: range, *, fine: bool) -> list[tuple[int, ...]]:
        """Layers that have ops together: all that follow one another and are of a kind."""
        if fine or not span:
            return [(layer,) for layer in span]
        return [tuple(unit) for _, unit in groupby(span, self._job.shape.kind_of)]

    def _walk(
        self, units: Sequence[tuple[int, ...]], tag: str, source: Buffer, target: Buffer
    ) -> Iterator[tuple[tuple[int, ...], Buffer, Buffer]]:
        """Yield layers, what they are given and what they make; the next ones are gathered."""
        weights = self._weights
        for number, unit in enumerate(units):
            ahead = units[number + 1 : number + 2]
            for gathered in ahead if number else units[:2]:
                weights.gather(weights.of(gathered), tag)
            out = target
            if ahead:
                size, dtype = self._input_bytes, self._job.dtype
                out = self._b.allocate("stream", size, "activation", dtype)
            yield unit, source, out
            if number:
                self._b.free(source)
            weights.drop(weights.of(unit))
            source = out

    def _after_backward(self, unit: Sequence[int], tag: str, *, last: bool) -> None:
        for layer in reversed(unit):
            for name in self._weights.of([layer]):
                self._weights.after_backward(name, tag, last=last)

    def versions_made(self, span: range, phase: Literal["forward", "backward"]) -> int:
        """Of what a chunk leaves: one, or two where the last op is a sum over tp in its place."""
        if not span:
            return 1
        layer = span[-1] if phase == "forward" else span[0]
        parts = self._parts[self._job.shape.kind_of(layer)].parts
        end = parts[-1].elements[-1] if phase == "forward" else parts[0].elements[0]
        summed = isinstance(end, CollectiveElement) and getattr(end, phase) == "all_reduce"
        return 2 if summed else 1

    def _pass_on(self, op_id: str, source: Buffer, target: Buffer, kind: str, j: int) -> None:
        """All that a chunk without layers does."""
        uses: list[Use] = [("given", source, "read"), ("made", target, "write")]
        self._b.compute(op_id, "pass_on", (), uses, self._b.label(kind, round_=j))


class PlainLayers(LayerEmitter):
    """Emits one op for the forward, and one for the backward, of layers that follow one another."""

    def __init__(
        self, builder: StageBuilder, job: Job, parts: LayerParts, weights: StageWeights, kind: str
    ) -> None:
        super().__init__(builder, job, parts, weights, kind)
        self._deferred: dict[tuple[int, int], Buffer] = {}

    def forward(
        self, unit: Sequence[int], j: int, source: Buffer, out: Buffer, *, first: bool
    ) -> None:
        """From the input of the first to the output of the last; `first` of the chunk."""
        uses: list[Use] = [("hidden", source, "read"), ("output", out, "write")]
        for layer in unit:
            uses += map(self._weights.read, self._weights.of([layer]))
            uses += self._kept.keep_all(layer, j, first=first and layer == unit[0])
        self._op("forward", "layer_forward", unit, j, self._works("forward"), uses)

    def backward(self, unit: Sequence[int], j: int, ends: Ends, *, first: bool) -> None:
        """From the gradient of the output to that of the input, with the weights' unless late."""
        entered, gradient, out = ends
        uses: list[Use] = [("d_output", gradient, "read"), ("d_hidden", out, "write")]
        if first:
            uses.append(("entered", entered, "read"))
        again = None
        if self._parts.full_recompute and not self._zero_bubble:
            size, dtype = self._parts.full_bytes, self._job.dtype
            again = self._b.allocate(f"again{self._kind}", size, "activation", dtype)
            uses.append(("again", again, "write"))
        for layer in unit:
            names = self._weights.of([layer])
            uses += [*map(self._weights.read, names), *self._kept.all_of(layer, j)]
            uses += (
                [self._put(layer, j)] if self._zero_bubble else map(self._weights.gradient, names)
            )
        works = self._works("backward_input")
        if self._parts.full_recompute:
            works = (*self._parts.recomputed, *works)
        if not self._zero_bubble:
            works = (*works, *self._works("backward_weight"))
        self._op("backward", "layer_backward", unit, j, works, uses)
        if again is not None:
            self._b.free(again)
        if not self._zero_bubble:
            for layer in unit:
                self._kept.release(layer, j)

    def weight(self, unit: Sequence[int], j: int, entered: Buffer) -> None:
        """The gradients of weights that backward has put off."""
        uses: list[Use] = [("entered", entered, "read")]
        for layer in unit:
            uses.append((f"put_off.{layer}", self._deferred[layer, j], "read"))
            uses += self._kept.all_of(layer, j)
            uses += map(self._weights.gradient, self._weights.of([layer]))
        self._op("weight", "weight", unit, j, self._works("backward_weight"), uses)
        for layer in unit:
            self._b.free(self._deferred.pop((layer, j)))
            self._kept.release(layer, j)

    def _put(self, layer: int, j: int) -> Use:
        """What the gradients of weights need, with what was computed again for it."""
        size = self._parts.gradient_bytes
        if self._parts.full_recompute:
            size += self._parts.full_bytes
        held = self._b.allocate(f"put_off.all{self._kind}", size, "activation", self._job.dtype)
        self._deferred[layer, j] = held
        return (f"put_off.{layer}", held, "write")

    def _works(self, kind: str) -> tuple[Work, ...]:
        works = self._parts.work()
        if kind != "forward":
            works = works[::-1]
        return tuple(one for work in works for one in getattr(work, kind))

    def _op(
        self, name: str, kind: str, unit: Sequence[int], j: int, works: tuple[Work, ...],
        uses: list[Use],
    ) -> None:  # fmt: skip
        """One call for as many layers, whichever they are."""
        call = f"{name}{self._kind}.{len(unit)}"
        if call not in self._b.calls and len(unit) > 1:
            works = tuple(times(work, len(unit)) for work in works)
        label = self._b.label(kind, unit[0], round_=j)
        self._b.compute(f"{name}.{unit[0]}.{j}", call, works, uses, label)


def kind_name(kind: int) -> str:
    """What the names of calls of a kind of layers have: nothing where all layers are alike."""
    return f"#{kind}" if kind else ""
