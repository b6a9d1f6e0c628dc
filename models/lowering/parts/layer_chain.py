"""A layer in parts, with what is said between them: a chain of ops, forward and backward."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from twinstream.models.layouts.job import Job
from twinstream.models.lowering.chain_builder import CollectiveCall
from twinstream.models.lowering.parts.builder import Buffer, Ends, StageBuilder, Use
from twinstream.models.lowering.parts.layer_parts import (
    Collective,
    CollectiveElement,
    Element,
    LayerCompute,
    LayerParts,
    Part,
    Ring,
    whole,
)
from twinstream.models.lowering.parts.weights import StageWeights
from twinstream.schedule.ops import Mode, Phase

Direction = Literal["forward", "backward"]
_COLUMN_PARALLEL = ("attention", "attention_before", "mlp")


class SavedActivations:
    """Slots of what layers keep, by layer, part and microbatch, taken in forward.

    Of a chunk's first layer the input is not among them: it is the chunk's.
    """

    def __init__(self, builder: StageBuilder, job: Job, parts: LayerParts, kind: str) -> None:
        self._b, self._dtype, self._parts, self._kind = builder, job.dtype, parts, kind
        self._held: dict[tuple[int, str, int], Buffer] = {}

    def keep(self, layer: int, part: Part, j: int, *, first: bool) -> list[Use]:
        """A slot for what a part keeps, as an operand that is written."""
        size = part.saved_bytes
        without_input = first and part is self._parts.parts[0]
        if without_input:
            size -= self._parts.input_bytes
        if size <= 0:
            return []
        pool = f"saved.{part.name}{self._kind}" + (".first" if without_input else "")
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


class LayerEmitter:
    """What emits the tasks of layers of a kind has; `kind` is part of the names of their calls."""

    def __init__(
        self, builder: StageBuilder, job: Job, parts: LayerParts, weights: StageWeights, kind: str
    ) -> None:
        self._b, self._job, self._parts, self._weights = builder, job, parts, weights
        self._kind = kind
        self._kept = SavedActivations(builder, job, parts, kind)
        self._zero_bubble = job.layout.pipeline == "zero_bubble"


class LayerChain(LayerEmitter):
    """Emits the elements of a layer one after the other; weights' gradients run beside them."""

    def __init__(
        self, builder: StageBuilder, job: Job, parts: LayerParts, weights: StageWeights, kind: str
    ) -> None:
        super().__init__(builder, job, parts, weights, kind)
        self._deferred: dict[tuple[int, str, int], Buffer] = {}
        self._again: dict[tuple[int, int], dict[str, Buffer]] = {}
        self._out, self._back = _stops(job, parts, "forward"), _stops(job, parts, "backward")

    def forward(
        self, unit: tuple[int, ...], j: int, source: Buffer, target: Buffer, *, first: bool,
        again: bool = False,
    ) -> dict[str, Buffer]:  # fmt: skip
        """Emit a layer. Again: of what parts then keep, by their names, backward disposes."""
        (layer,) = unit
        tag = f"{layer}.{j}" + (".again" if again else "")
        phase: Phase | None = "recompute" if again else None
        made: dict[str, Buffer] = {}
        flow = _Flow(self._b, self._job.dtype, source, target, self._out)
        seen: set[str] = set()
        for at, part, element, _, _ in flow:
            if isinstance(element, CollectiveElement):
                self._said(element, element.forward, f"{tag}.{at}", flow)
                continue
            uses: list[Use] = [("hidden", flow.current, "read"), ("output", flow.to, "write")]
            if part.name not in seen:
                seen.add(part.name)
                uses += self._keep(layer, part, j, made, first=first, again=again)
            self._forward(layer, element, tag, uses, j, phase)
        return made

    def backward(self, unit: tuple[int, ...], j: int, ends: Ends, *, first: bool) -> None:
        """Go from the gradient of a layer's output to that of its input."""
        (layer,) = unit
        entered, gradient, target = ends
        again: dict[str, Buffer] = {}
        if self._parts.full_recompute:
            kept = None if first else self._kept.of(layer, "attention", j)
            end = self._b.allocate(
                "again.end", self._parts.input_bytes, "activation", self._job.dtype
            )
            again = self.forward(unit, j, kept or entered, end, first=first, again=True)
            self._b.free(end)
        flow = _Flow(self._b, self._job.dtype, gradient, target, self._back)
        for at, part, element, _, _ in flow:
            if isinstance(element, CollectiveElement):
                self._said(element, element.backward, f"b{layer}.{j}.{at}", flow)
                continue
            kept_uses = self._saved(layer, part, j, again)
            if first and part is self._parts.parts[0]:
                kept_uses.append(("entered", entered, "read"))
            self._backward(layer, part, element, (flow.current, flow.to), kept_uses, j)
        if self._zero_bubble:
            self._again[layer, j] = again
        else:
            self._release(layer, j, again)

    def weight(self, unit: tuple[int, ...], j: int, entered: Buffer) -> None:
        """Make the gradients of weights that backward has put off."""
        (layer,) = unit
        again = self._again.pop((layer, j))
        for part in self._parts.parts[::-1]:
            for element in part.elements[::-1]:
                if not isinstance(element, LayerCompute) or not element.gradient_bytes:
                    continue
                held = self._deferred.pop((layer, element.name, j))
                kept = self._saved(layer, part, j, again)
                gathered = self._gather_again(layer, part, element, kept, j)
                uses: list[Use] = [("d_output", held, "read"), *kept]
                if part is self._parts.parts[0]:
                    uses.append(("entered", entered, "read"))
                self._weight(layer, element, uses, gathered, j)
                self._b.free(held)
        self._release(layer, j, again)

    def _forward(
        self, layer: int, element: LayerCompute | Ring, tag: str, uses: list[Use], j: int,
        phase: Phase | None,
    ) -> None:  # fmt: skip
        if isinstance(element, Ring):
            self._ring(element, layer, tag, uses, j, phase or "forward")
        else:
            uses = [*uses, self._weights.read(f"{layer}{element.suffix}")]
            works = element.work.forward
            label = self._b.label(f"{element.name}_forward", layer, round_=j, phase=phase)
            name = f"forward.{element.name}"
            self._b.compute(f"{name}.{tag}", name + self._kind, works, uses, label)

    def _backward(
        self, layer: int, part: Part, element: LayerCompute | Ring,
        flow: tuple[Buffer, Buffer], kept: list[Use], j: int,
    ) -> None:  # fmt: skip
        """The gradient of the input; then, beside what follows, that of the weights."""
        current, to = flow
        uses: list[Use] = [("d_output", current, "read"), ("d_hidden", to, "write"), *kept]
        if isinstance(element, Ring):
            self._ring(element, layer, f"b{layer}.{j}", uses, j, "backward")
            return
        uses.append(self._weights.read(f"{layer}{element.suffix}"))
        if self._zero_bubble and (size := element.gradient_bytes):
            pool = f"put_off.{element.name}{self._kind}"
            put = self._b.allocate(pool, size, "activation", self._job.dtype)
            self._deferred[layer, element.name, j] = put
            uses.append(("put_off", put, "write"))
        gathered = None if self._zero_bubble else self._gather_again(layer, part, element, kept, j)
        name = f"backward.{element.name}"
        label = self._b.label(f"{element.name}_backward", layer, round_=j)
        works, call = element.work.backward_input, name + self._kind
        self._b.compute(f"{name}.{layer}.{j}", call, works, uses, label)
        if not self._zero_bubble:
            self._weight(layer, element, [("d_output", current, "read"), *kept], gathered, j)

    def _ring(
        self, ring: Ring, layer: int, tag: str, uses: list[Use], j: int, phase: Phase
    ) -> None:
        """The steps of one layer and microbatch; `uses`: what flows in, what it makes, the rest."""
        b, dtype = self._b, self._job.dtype
        tensor = f"kv.{tag}"  # own block and those that come: version 1 of it on every rank
        backward = phase == "backward"
        works = ring.step.backward if backward else ring.step.forward
        pool, size = "kv.b" if backward else "kv.f", ring.sent_bytes(backward=backward)
        block = b.exchanged(pool, size, "context", dtype, tensor, spare=1)
        made: list[Use] = [uses[0], ("kv", block, "write")]
        label = b.label("kv", layer, round_=j, phase=phase)
        b.compute(f"kv.{tag}", "kv", (), made, label)
        (name, out, _), call = uses[1], ("core.b" if backward else "core.f") + self._kind
        for step in range(ring.num_steps):
            after = None
            if step + 1 < ring.num_steps:
                after = b.exchanged(pool, size, "context", dtype, tensor, spare=1)
                label = b.label("ring", layer, round_=j)
                sent: list[Use] = [("kv", block, "read")]
                heard: list[Use] = [("kv", after, "write")]
                send, recv = f"ring_send.{tag}.{step}", f"ring_recv.{tag}.{step}"
                b.communicate(send, CollectiveCall("send", ("cp",), "cp.send", 1), sent, label)
                b.communicate(recv, CollectiveCall("recv", ("cp",), "cp.recv", -1), heard, label)
            made_so_far: Mode = "update" if step else "write"
            # what is saved is there since the first step
            rest = [use for use in uses[2:] if not step or use[2] != "write"]
            operands: list[Use] = [uses[0], (name, out, made_so_far), ("kv", block, "read"), *rest]
            label = b.label("core", layer, round_=j, phase=phase)
            b.compute(f"core.{tag}.{step}", call, works, operands, label)
            block = after or block

    def _gather_again(
        self, layer: int, part: Part, element: LayerCompute, kept: list[Use], j: int
    ) -> Buffer | None:
        """What a column-parallel product read, gathered once more for its weights' gradient."""
        if not (part.gathered_bytes and element.name in _COLUMN_PARALLEL and kept):
            return None
        b, tag, size = self._b, f"{element.name}.{layer}.{j}", part.gathered_bytes
        dtype, own = self._job.dtype, size // self._job.layout.tp
        pool = "" if own == self._parts.input_bytes else f".{part.name}"
        gathered = b.allocate(f"gathered_again{pool}", size, "activation", dtype)
        given = b.allocate(f"gathered_part{pool}", own, "activation", dtype)
        told: list[Use] = [kept[0], ("part", given, "write")]
        b.compute(f"part.{tag}", "part", (), told, b.label("part", layer, round_=j))
        uses: list[Use] = [("part", given, "read"), ("hidden", gathered, "write")]
        label = b.label("tp", layer, round_=j)
        b.communicate(f"gather.{tag}", CollectiveCall("all_gather", ("tp",), "tp"), uses, label)
        b.free(given)
        return gathered

    def _weight(
        self, layer: int, element: LayerCompute, uses: list[Use], gathered: Buffer | None, j: int
    ) -> None:
        """The gradient of an element's weights, beside what follows in backward."""
        if element.work.backward_weight:
            if gathered is not None:
                uses = [*uses, ("gathered", gathered, "read")]
            uses = [*uses, self._weights.gradient(f"{layer}{element.suffix}")]
            name = f"weight.{element.name}"
            label = self._b.label(f"{element.name}_weight", layer, round_=j)
            works = element.work.backward_weight
            self._b.compute(f"{name}.{layer}.{j}", name + self._kind, works, uses, label)
        if gathered is not None:
            self._b.free(gathered)

    def _keep(
        self, layer: int, part: Part, j: int, made: dict[str, Buffer], *, first: bool, again: bool
    ) -> list[Use]:
        if not again:
            return self._kept.keep(layer, part, j, first=first)
        pool = f"again.{part.name}{self._kind}"
        made[part.name] = self._b.allocate(pool, part.full_bytes, "activation", self._job.dtype)
        return [(pool, made[part.name], "write")]

    def _release(self, layer: int, j: int, again: dict[str, Buffer]) -> None:
        for held in again.values():
            self._b.free(held)
        self._kept.release(layer, j)

    def _saved(self, layer: int, part: Part, j: int, again: dict[str, Buffer]) -> list[Use]:
        held = again.get(part.name) or self._kept.of(layer, part.name, j)
        return [] if held is None else [("saved", held, "read")]

    def _said(
        self, talk: CollectiveElement, collective: Collective | None, tag: str, flow: "_Flow"
    ) -> None:
        assert collective is not None
        uses: list[Use] = [("hidden", flow.current, "update")]
        if collective != "all_reduce":
            uses = [("given", flow.current, "read"), ("made", flow.to, "write")]
        said = CollectiveCall(collective, talk.axes, talk.axis)
        self._b.communicate(f"{talk.axis}.{tag}", said, uses, self._b.label(talk.axis))


class _Stop(NamedTuple):
    """An element on the way through a layer: what it makes is of a pool (None: made in place)."""

    at: int
    part: Part
    element: Element
    pool: str | None
    size_bytes: int


class _Flow:
    """The hidden state on its way through elements: each reads `current` and makes `to`.

    The last one makes the target; sums over tp are made in place.
    """

    def __init__(
        self,
        builder: StageBuilder,
        dtype: str,
        source: Buffer,
        target: Buffer,
        stops: Sequence[_Stop],
    ) -> None:
        self._b, self._dtype, self._target, self._stops = builder, dtype, target, stops
        self._pool = ""
        self.current = self.to = source

    def __iter__(self) -> Iterator[_Stop]:
        for stop in self._stops:
            if (pool := stop.pool) is None:
                yield stop
                continue
            self.to = self._target
            if pool:
                self.to = self._b.allocate(pool, stop.size_bytes, "activation", self._dtype)
            yield stop
            if self._pool:
                self._b.free(self.current)
            self.current, self._pool = self.to, pool


def _stops(job: Job, parts: LayerParts, direction: Direction) -> tuple[_Stop, ...]:
    """What is done of every layer in a direction; the last that makes something has no pool."""
    moves = [
        (part, element)
        for part in parts.parts
        for element in part.elements
        if not isinstance(element, CollectiveElement) or getattr(element, direction) is not None
    ]
    if direction == "backward":
        moves = moves[::-1]
    found: list[_Stop] = []
    after: Element | None = None
    for at, (part, element) in reversed(list(enumerate(moves))):
        if isinstance(element, CollectiveElement) and getattr(element, direction) == "all_reduce":
            found.append(_Stop(at, part, element, None, 0))
            continue
        size = 0 if after is None else _bytes(job, element, after, direction)
        found.append(_Stop(at, part, element, "" if after is None else f"flow.{size}", size))
        after = element
    return tuple(found[::-1])


def _bytes(job: Job, element: Element, after: Element, direction: Direction) -> int:
    """Of what an element makes: what the next one takes, or all hidden states."""
    forward = direction == "forward"
    for one, into in ((element, False), (after, True)):
        if isinstance(one, CollectiveElement):
            return one.out_bytes if forward != into else one.in_bytes
    return whole(job)
