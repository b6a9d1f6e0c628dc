"""What layers keep of a microbatch between forward and backward."""

from twinstream.clusters.job import Job
from twinstream.clusters.lowering.builder import Buffer, StageBuilder, Use
from twinstream.clusters.lowering.parts import LayerParts, Part


class SavedActivations:
    """Slots of what layers keep, by layer, part and microbatch, taken in forward.

    Of a chunk's first layer the input is not among them: it is the chunk's.
    """

    def __init__(self, builder: StageBuilder, job: Job, parts: LayerParts) -> None:
        self._b, self._dtype, self._parts = builder, job.dtype, parts
        self._held: dict[tuple[int, str, int], Buffer] = {}

    def keep(self, layer: int, part: Part, j: int, *, first: bool) -> list[Use]:
        """A slot for what a part keeps, as an operand that is written."""
        size = part.saved_bytes
        without_input = first and part is self._parts.parts[0]
        if without_input:
            size -= self._parts.input_bytes
        if size <= 0:
            return []
        pool = f"saved.{part.name}" + (".first" if without_input else "")
        held = self._b.allocate(pool, size, "activation", self._dtype)
        self._held[layer, part.name, j] = held
        return [(f"saved.{layer}.{part.name}", held, "write")]

    def keep_all(self, layer: int, j: int, *, first: bool) -> list[Use]:
        """Of all parts of a layer."""
        return [use for part in self._parts.parts for use in self.keep(layer, part, j, first=first)]

    def of(self, layer: int, part: str, j: int) -> Buffer | None:
        """What a part has kept, if anything."""
        return self._held.get((layer, part, j))

    def all_of(self, layer: int, j: int) -> list[Use]:
        """What a layer has kept, as operands that are read."""
        names = [part.name for part in self._parts.parts]
        found = [(name, self.of(layer, name, j)) for name in names]
        return [(f"saved.{layer}.{name}", held, "read") for name, held in found if held is not None]

    def release(self, layer: int, j: int) -> None:
        """A layer's backward is through with it."""
        for part in self._parts.parts:
            found = self._held.pop((layer, part.name, j), None)
            if found is not None:
                self._b.free(found)
