"""The layers of a virtual stage, forward and backward, with their parameters gathered ahead."""

from dataclasses import replace
from typing import Literal

from twinstream.clusters.job import Job
from twinstream.clusters.lowering.builder import Buffer, Ends, StageBuilder, Use
from twinstream.clusters.lowering.layer_chain import LayerChain
from twinstream.clusters.lowering.layer_weights import LayerWeights
from twinstream.clusters.lowering.parts import CollectiveElement, LayerParts, layer_parts
from twinstream.clusters.lowering.plain_layers import PlainLayers
from twinstream.clusters.lowering.weights import StageWeights


class LayerOps:
    """Emits chunks of layers. `alone`: each layer has ops of its own, whatever the microbatch."""

    def __init__(
        self, builder: StageBuilder, job: Job, weights: StageWeights, *, folded: bool = False
    ) -> None:
        self._b, self._job = builder, job
        self._parts: LayerParts = layer_parts(job)
        if folded:
            self._parts = replace(self._parts, plain=True)
        self._weights = LayerWeights(job, weights)
        self._plain = PlainLayers(builder, job, self._parts, self._weights)
        self._chain = LayerChain(builder, job, self._parts, self._weights)
        self._zero_bubble = job.layout.pipeline == "zero_bubble"
        scattered = job.layout.zero >= 2  # so that few layers' gradients are whole at a time
        self.alone = not self._parts.plain or scattered or job.layout.offload

    def forward(
        self, span: range, chunk: int, j: int, source: Buffer, target: Buffer, *, fine: bool
    ) -> None:
        """From a chunk's input to its output; what backward needs stays."""
        if not span:
            self._pass_on(f"forward.none{chunk}.{j}", source, target, "layer_forward", j)
            return
        units = _units(span, fine)
        self._weights.gather(units[0], f"f{chunk}.{j}")
        for number, unit in enumerate(units):
            if number + 1 < len(units):
                self._weights.gather(units[number + 1], f"f{chunk}.{j}")
            out = target if number == len(units) - 1 else self._stream()
            if self._parts.plain:
                self._plain.forward(unit, j, source, out, first=number == 0)
            else:
                self._chain.forward(unit[0], j, source, out, first=number == 0)
            if number:
                self._b.free(source)
            self._weights.drop(unit)
            source = out

    def backward(
        self, span: range, chunk: int, j: int, ends: Ends, *, fine: bool, last: bool
    ) -> None:
        """From the gradient of a chunk's output to that of its input."""
        entered, gradient, target = ends
        if not span:
            self._pass_on(f"backward.none{chunk}.{j}", gradient, target, "layer_backward", j)
            return
        units = _units(span, fine)[::-1]
        self._weights.gather(units[0], f"b{chunk}.{j}")
        for number, unit in enumerate(units):
            if number + 1 < len(units):
                self._weights.gather(units[number + 1], f"b{chunk}.{j}")
            first = number == len(units) - 1
            out = target if first else self._stream()
            if self._parts.plain:
                self._plain.backward(unit, j, (entered, gradient, out), first=first)
            else:
                self._chain.backward(unit[0], j, (entered, gradient, out), first=first)
            if number:
                self._b.free(gradient)
            self._weights.drop(unit)
            if not self._zero_bubble:
                self._weights.after_backward(unit, f"{chunk}.{j}", last=last)
            gradient = out

    def weight(
        self, span: range, chunk: int, j: int, entered: Buffer, *, fine: bool, last: bool
    ) -> None:
        """The gradients of weights that backward has put off."""
        for unit in _units(span, fine)[::-1] if span else ():
            if self._parts.plain:
                self._plain.weight(unit, j, entered)
            else:
                self._chain.weight(unit[0], j, entered)
            self._weights.after_backward(unit, f"{chunk}.{j}", last=last)

    def versions_made(self, span: range, phase: Literal["forward", "backward"]) -> int:
        """Of what a chunk leaves: one, or two where the last op is a sum over tp in its place."""
        parts = self._parts.parts
        end = parts[-1].elements[-1] if phase == "forward" else parts[0].elements[0]
        summed = isinstance(end, CollectiveElement) and getattr(end, phase) == "all_reduce"
        return 2 if span and summed else 1

    def _pass_on(self, op_id: str, source: Buffer, target: Buffer, kind: str, j: int) -> None:
        """All that a chunk without layers does."""
        uses: list[Use] = [("given", source, "read"), ("made", target, "write")]
        self._b.compute(op_id, "pass_on", (), uses, self._b.label(kind, microbatch=j))

    def _stream(self) -> Buffer:
        return self._b.allocate("stream", self._parts.input_bytes, "activation", self._job.dtype)


def _units(span: range, fine: bool) -> list[tuple[int, ...]]:
    """Layers that have ops together."""
    return [(layer,) for layer in span] if fine else [tuple(span)]
