"""Layers in which nothing is said: one op for several."""

from collections.abc import Sequence

from twinstream.clusters.job import Job
from twinstream.clusters.lowering.builder import Buffer, Ends, StageBuilder, Use
from twinstream.clusters.lowering.kept import SavedActivations
from twinstream.clusters.lowering.layer_weights import LayerWeights
from twinstream.clusters.lowering.parts import LayerParts
from twinstream.models.shapes.kernels import times
from twinstream.schedule.cost import Work


class PlainLayers:
    """Emits one op for the forward, and one for the backward, of layers that follow one another."""

    def __init__(
        self, builder: StageBuilder, job: Job, parts: LayerParts, weights: LayerWeights
    ) -> None:
        self._b, self._job, self._parts, self._weights = builder, job, parts, weights
        self._kept = SavedActivations(builder, job, parts)
        self._zero_bubble = job.layout.pipeline == "zero_bubble"
        self._deferred: dict[tuple[int, int], Buffer] = {}

    def forward(
        self, unit: Sequence[int], j: int, source: Buffer, out: Buffer, *, first: bool
    ) -> None:
        """From the input of the first to the output of the last; `first` of the chunk."""
        uses: list[Use] = [("hidden", source, "read"), ("output", out, "write")]
        for layer in unit:
            uses += self._weights.read(layer)
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
            again = self._b.allocate("again", self._parts.full_bytes, "activation", self._job.dtype)
            uses.append(("again", again, "write"))
        for layer in unit:
            uses += [*self._weights.read(layer), *self._kept.all_of(layer, j)]
            uses += [self._put(layer, j)] if self._zero_bubble else self._weights.gradients(layer)
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
            uses += [*self._kept.all_of(layer, j), *self._weights.gradients(layer)]
        self._op("weight", "weight", unit, j, self._works("backward_weight"), uses)
        for layer in unit:
            self._b.free(self._deferred.pop((layer, j)))
            self._kept.release(layer, j)

    def _put(self, layer: int, j: int) -> Use:
        """What the gradients of weights need, with what was computed again for it."""
        size = self._parts.gradient_bytes
        if self._parts.full_recompute:
            size += self._parts.full_bytes
        held = self._b.allocate("put_off.all", size, "activation", self._job.dtype)
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
        call = f"{name}.{len(unit)}"
        if call not in self._b.calls and len(unit) > 1:
            works = tuple(times(work, len(unit)) for work in works)
        label = self._b.label(kind, unit[0], microbatch=j)
        self._b.compute(f"{name}.{unit[0]}.{j}", call, works, uses, label)
