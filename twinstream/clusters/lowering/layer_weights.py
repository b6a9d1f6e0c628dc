"""The groups of parameters of layers, as their ops use them."""

from collections.abc import Sequence
from typing import Literal

from twinstream.clusters.job import Job
from twinstream.clusters.lowering.builder import Use
from twinstream.clusters.lowering.weights import StageWeights


class LayerWeights:
    """A layer has a group of its own, and one of its experts where it has some."""

    def __init__(self, job: Job, weights: StageWeights) -> None:
        self._weights = weights
        self._experts = job.shape.experts is not None
        self._sharded = job.layout.zero == 3

    def read(self, layer: int) -> list[Use]:
        """All parameters of a layer."""
        return [self._weights.read(name) for name in self._names(layer)]

    def read_of(self, layer: int, group: Literal["layer", "experts"]) -> Use:
        """The parameters of one group of a layer."""
        return self._weights.read(self._name(layer, group))

    def gradients(self, layer: int) -> list[Use]:
        """All gradients of a layer."""
        return [self._weights.gradient(name) for name in self._names(layer)]

    def gradient_of(self, layer: int, group: Literal["layer", "experts"]) -> Use:
        """The gradient of one group of a layer."""
        return self._weights.gradient(self._name(layer, group))

    def gather(self, layers: Sequence[int], tag: str) -> None:
        """Gather what is in shards."""
        for layer in layers if self._sharded else ():
            for name in self._names(layer):
                self._weights.gather(name, tag)

    def drop(self, layers: Sequence[int]) -> None:
        """What was gathered is not needed any more."""
        for layer in layers if self._sharded else ():
            for name in self._names(layer):
                self._weights.drop(name)

    def after_backward(self, layers: Sequence[int], tag: str, *, last: bool) -> None:
        """Reduce gradients, or note that they are complete."""
        for layer in reversed(layers):
            for name in self._names(layer):
                self._weights.after_backward(name, tag, last=last)

    def _names(self, layer: int) -> list[str]:
        return [str(layer), *([f"{layer}.experts"] if self._experts else [])]

    def _name(self, layer: int, group: Literal["layer", "experts"]) -> str:
        return f"{layer}.experts" if group == "experts" else str(layer)
