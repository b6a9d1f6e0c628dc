"""Layers of a virtual stage, forward and backward: one op for all where nothing is said inside."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from twinstream.clusters.job import Job
from twinstream.clusters.lowering.builder import Held, StageBuilder, Use
from twinstream.clusters.lowering.parts import (
    Compute,
    LayerParts,
    Part,
    Ring,
    Talk,
    layer_parts,
    whole,
)
from twinstream.clusters.lowering.weights import StageWeights
from twinstream.schedule.cost import Work
from twinstream.schedule.ops import Mode

Ends = tuple[Held, Held, Held]  # what a chunk was given, its output's gradient, its input's


class LayerOps:
    """Emits layers. `alone`: each layer has ops of its own, whatever the microbatch."""

    def __init__(
        self, builder: StageBuilder, job: Job, weights: StageWeights, *, folded: bool = False
    ) -> None:
        self.b, self.job, self.weights = builder, job, weights
        self.parts: LayerParts = layer_parts(job)
        if folded:
            self.parts = replace(self.parts, plain=True)
        self.experts = job.shape.experts is not None
        self.late = job.layout.pipeline == "zero_bubble"
        self.sharded = job.layout.zero == 3
        self.alone = not self.parts.plain or self.sharded or job.layout.offload
        self._saved: dict[tuple[int, str, int], Held] = {}
        self._put_off: dict[tuple[int, str, int], Held] = {}

    def forward(
        self, span: range, chunk: int, j: int, source: Held, target: Held, *, fine: bool
    ) -> None:
        """From a chunk's input to its output; what backward needs stays."""
        if not span:
            self._pass_on(f"forward.none{chunk}.{j}", source, target, "layer_forward", j)
            return
        units = _units(span, fine)
        self._gather(units[0], f"f{chunk}.{j}")
        for number, unit in enumerate(units):
            if number + 1 < len(units):
                self._gather(units[number + 1], f"f{chunk}.{j}")
            last = number == len(units) - 1
            out = target if last else self._stream()
            if self.parts.plain:
                self._plain_forward(unit, j, source, out, first=number == 0)
            else:
                self._chain_forward(unit[0], j, source, out, first=number == 0)
            if number:
                self.b.give_back("stream", source)
            self._drop(unit, keep=last)
            source = out
        self._drop(units[-1])

    def backward(
        self, span: range, chunk: int, j: int, ends: Ends, *, fine: bool, last: bool
    ) -> None:
        """From the gradient of a chunk's output to that of its input."""
        entered, gradient, target = ends
        if not span:
            self._pass_on(f"backward.none{chunk}.{j}", gradient, target, "layer_backward", j)
            return
        units = _units(span, fine)[::-1]
        self._gather(units[0], f"b{chunk}.{j}")
        for number, unit in enumerate(units):
            if number + 1 < len(units):
                self._gather(units[number + 1], f"b{chunk}.{j}")
            out = target if number == len(units) - 1 else self._stream()
            first = number == len(units) - 1
            if self.parts.plain:
                self._plain_backward(unit, j, (entered, gradient, out), first=first)
            else:
                self._chain_backward(unit[0], j, (entered, gradient, out), first=first)
            if number:
                self.b.give_back("stream", gradient)
            self._drop(unit)
            if not self.late:
                self._after(unit, f"{chunk}.{j}", last=last)
            gradient = out

    def weight(
        self, span: range, chunk: int, j: int, entered: Held, *, fine: bool, last: bool
    ) -> None:
        """The gradients of weights that backward has put off."""
        if not span:
            return
        for unit in _units(span, fine)[::-1]:
            if self.parts.plain:
                works = _times(self._all("backward_weight"), len(unit))
                uses: list[Use] = [("entered", entered, "read")]
                for layer in unit:
                    uses += [(f"put_off.{layer}", self._put_off[layer, "all", j], "read")]
                    uses += [(f"saved.{layer}", held, "read") for held in self._kept(layer, j)]
                    uses += self._gradients(layer)
                self._op(
                    f"weight.{unit[0]}.{j}",
                    f"weight.{len(unit)}",
                    works,
                    uses,
                    "weight",
                    unit[0],
                    j,
                )
                for layer in unit:
                    self.b.give_back("put_off.all", self._put_off.pop((layer, "all", j)))
                    self._release(layer, j)
            else:
                self._chain_weight(unit[0], j)
            self._after(unit, f"{chunk}.{j}", last=last)

    def _pass_on(self, op_id: str, source: Held, target: Held, kind: str, j: int) -> None:
        """All that a chunk without layers does."""
        uses: list[Use] = [("given", source, "read"), ("made", target, "write")]
        self.b.compute(op_id, "pass_on", (), uses, self.b.label(kind, microbatch=j))

    def versions_made(self, span: range, phase: Literal["forward", "backward"]) -> int:
        """Of what a chunk leaves: one, or two where the last op is a sum over tp in its place."""
        parts = self.parts.parts
        end = parts[-1].elements[-1] if phase == "forward" else parts[0].elements[0]
        summed = isinstance(end, Talk) and getattr(end, phase) == "all_reduce"
        return 2 if span and summed else 1

    # One op for several layers.

    def _plain_forward(
        self, unit: Sequence[int], j: int, source: Held, out: Held, *, first: bool
    ) -> None:
        uses: list[Use] = [("hidden", source, "read"), ("output", out, "write")]
        for layer in unit:
            uses += self._read(layer)
            uses += self._save(layer, j, inputs=not (first and layer == unit[0]))
        works = _times(self._all("forward"), len(unit))
        self._op(
            f"forward.{unit[0]}.{j}",
            f"forward.{len(unit)}",
            works,
            uses,
            "layer_forward",
            unit[0],
            j,
        )

    def _plain_backward(self, unit: Sequence[int], j: int, ends: Ends, *, first: bool) -> None:
        entered, gradient, out = ends
        uses: list[Use] = [("d_output", gradient, "read"), ("d_hidden", out, "write")]
        if first:
            uses.append(("entered", entered, "read"))
        again = None
        if self.parts.full_recompute:
            again = self.b.take("again", sum(p.full_bytes for p in self.parts.parts), "activation",
                                self.job.dtype)  # fmt: skip
            uses.append(("again", again, "write"))
        for layer in unit:
            uses += self._read(layer)
            uses += [
                (f"saved.{layer}.{n}", held, "read") for n, held in enumerate(self._kept(layer, j))
            ]
            if self.late:
                held = self.b.take(
                    "put_off.all", self._put_off_bytes(), "activation", self.job.dtype
                )
                self._put_off[layer, "all", j] = held
                uses.append((f"put_off.{layer}", held, "write"))
            else:
                uses += self._gradients(layer)
        works = self._all("backward_input")
        if self.parts.full_recompute:
            works = (*self._all("forward"), *works)
        if not self.late:
            works = (*works, *self._all("backward_weight"))
        works = _times(works, len(unit))
        self._op(
            f"backward.{unit[0]}.{j}",
            f"backward.{len(unit)}",
            works,
            uses,
            "layer_backward",
            unit[0],
            j,
        )
        if again is not None:
            self.b.give_back("again", again)
        if not self.late:
            for layer in unit:
                self._release(layer, j)

    # A layer in parts.

    def _chain_forward(
        self, layer: int, j: int, source: Held, target: Held, *, first: bool, again: bool = False
    ) -> list[tuple[str, Held]]:
        """All elements of a layer; again: what is saved is kept only until its backward."""
        tag = f"{layer}.{j}" + (".again" if again else "")
        moves = [(part, e) for part in self.parts.parts for e in part.elements
                 if not isinstance(e, Talk) or e.forward is not None]  # fmt: skip
        made: list[tuple[str, Held]] = []
        current, pool = source, ""
        seen: set[str] = set()
        for at, (part, element) in enumerate(moves):
            if isinstance(element, Talk) and element.forward == "all_reduce":
                self._talk(element, f"{tag}.{at}", "all_reduce", [("hidden", current, "update")])
                continue
            left = [
                e
                for _, e in moves[at + 1 :]
                if not (isinstance(e, Talk) and e.forward == "all_reduce")
            ]
            to, to_pool = (
                (target, "") if not left else self._flow(_out_bytes(self.job, element, left))
            )
            if isinstance(element, Talk):
                assert element.forward is not None
                self._talk(element, f"{tag}.{at}", element.forward,
                           [("given", current, "read"), ("made", to, "write")])  # fmt: skip
            else:
                keep: list[Use] = []
                if part.name not in seen:
                    seen.add(part.name)
                    keep, new = self._keep(layer, part, j, again=again, inputs=not first)
                    made += new
                self._forward_element(
                    layer,
                    part,
                    element,
                    tag,
                    [("hidden", current, "read"), ("output", to, "write"), *keep],
                    j,
                )
            if pool:
                self.b.give_back(pool, current)
            current, pool = to, to_pool
        return made

    def _forward_element(
        self, layer: int, part: Part, element: Compute | Ring, tag: str, uses: list[Use], j: int
    ) -> None:
        if isinstance(element, Ring):
            self._ring(element, layer, tag, element.step.forward, uses, j)
            return
        uses = [*uses, *self._read(layer, element.weights)]
        self._op(f"forward.{element.name}.{tag}", f"forward.{element.name}", element.work.forward, uses,
                 f"{element.name}_forward", layer, j)  # fmt: skip

    def _chain_backward(self, layer: int, j: int, ends: Ends, *, first: bool) -> None:
        entered, gradient, target = ends
        made: list[tuple[str, Held]] = []
        if self.parts.full_recompute:
            source = entered if first else self._saved[layer, "attention", j]
            end, pool = self._flow(self.parts.input_bytes)
            made = self._chain_forward(layer, j, source, end, first=first, again=True)
            self.b.give_back(pool, end)
        again = dict(made)
        moves = [(part, e) for part in self.parts.parts for e in part.elements
                 if not isinstance(e, Talk) or e.backward is not None][::-1]  # fmt: skip
        current, pool = gradient, ""
        for at, (part, element) in enumerate(moves):
            if isinstance(element, Talk) and element.backward == "all_reduce":
                self._talk(
                    element, f"b{layer}.{j}.{at}", "all_reduce", [("d_hidden", current, "update")]
                )
                continue
            left = [
                e
                for _, e in moves[at + 1 :]
                if not (isinstance(e, Talk) and e.backward == "all_reduce")
            ]
            to, to_pool = (
                (target, "") if not left else self._flow(_back_bytes(self.job, element, left))
            )
            if isinstance(element, Talk):
                assert element.backward is not None
                self._talk(element, f"b{layer}.{j}.{at}", element.backward,
                           [("given", current, "read"), ("made", to, "write")])  # fmt: skip
            else:
                saved = again.get(part.name) or self._saved.get((layer, part.name, j))
                kept: list[Use] = [("saved", saved, "read")] if saved is not None else []
                if first and part is self.parts.parts[0]:
                    kept.append(("entered", entered, "read"))
                self._backward_element(layer, part, element, (current, to), kept, j)
            if pool:
                self.b.give_back(pool, current)
            current, pool = to, to_pool
        for name, held in made:
            self.b.give_back(f"again.{name}", held)
        if not self.late:
            self._release(layer, j)

    def _backward_element(
        self,
        layer: int,
        part: Part,
        element: Compute | Ring,
        flow: tuple[Held, Held],
        kept: list[Use],
        j: int,
    ) -> None:
        """The gradient of the input; then, beside what follows, that of the weights."""
        current, to = flow
        tag = f"{element.name}.{layer}.{j}"
        uses: list[Use] = [("d_output", current, "read"), ("d_hidden", to, "write"), *kept]
        if isinstance(element, Ring):
            self._ring(element, layer, f"b{layer}.{j}", element.step.backward, uses, j)
            return
        uses += self._read(layer, element.weights)
        if self.late:
            key = (layer, element.name, j)
            self._put_off[key] = self.b.take(
                "put_off", whole(self.job), "activation", self.job.dtype
            )
            uses.append(("put_off", self._put_off[key], "write"))
        gathered = None if self.late else self._gather_again(layer, part, element, kept, j)
        self._op(f"backward.{tag}", f"backward.{element.name}", element.work.backward_input, uses,
                 f"{element.name}_backward", layer, j)  # fmt: skip
        if not self.late:
            self._weight_element(
                layer, element, [("d_output", current, "read"), *kept], gathered, j
            )

    def _gather_again(
        self, layer: int, part: Part, element: Compute, kept: list[Use], j: int
    ) -> Held | None:
        """What a column-parallel product read, beside the gradient of its input: for its weights."""
        column = element.name in ("attention", "attention_before", "mlp")
        if not (part.gathered_bytes and column and kept):
            return None
        b, tag = self.b, f"{element.name}.{layer}.{j}"
        gathered = b.take("gathered_again", part.gathered_bytes, "activation", self.job.dtype)
        given = b.take("gathered_part", self.parts.input_bytes, "activation", self.job.dtype)
        self._op(f"part.{tag}", "part", (), [kept[0], ("part", given, "write")], "part", layer, j)
        b.communicate(
            f"gather.{tag}", "all_gather", ("tp",), "tp",
            [("part", given, "read"), ("hidden", gathered, "write")], b.label("tp", layer, microbatch=j),
        )  # fmt: skip
        b.give_back("gathered_part", given)
        return gathered

    def _weight_element(
        self, layer: int, element: Compute, uses: list[Use], gathered: Held | None, j: int
    ) -> None:
        """The gradient of an element's weights, beside what follows in backward."""
        if element.work.backward_weight:
            tag = f"{element.name}.{layer}.{j}"
            if gathered is not None:
                uses = [*uses, ("gathered", gathered, "read")]
            name = f"{layer}.experts" if element.weights == "experts" else str(layer)
            uses = [*uses, self.weights.gradient(name)]
            self._op(f"weight.{tag}", f"weight.{element.name}", element.work.backward_weight, uses,
                     f"{element.name}_weight", layer, j)  # fmt: skip
        if gathered is not None:
            self.b.give_back("gathered_again", gathered)

    def _chain_weight(self, layer: int, j: int) -> None:
        for part in self.parts.parts[::-1]:
            for element in part.elements[::-1]:
                if not isinstance(element, Compute):
                    continue
                held = self._put_off.pop((layer, element.name, j))
                saved = self._saved.get((layer, part.name, j))
                kept: list[Use] = [("saved", saved, "read")] if saved is not None else []
                gathered = self._gather_again(layer, part, element, kept, j)
                self._weight_element(
                    layer, element, [("d_output", held, "read"), *kept], gathered, j
                )
                self.b.give_back("put_off", held)
        self._release(layer, j)

    def _ring(
        self, ring: Ring, layer: int, tag: str, works: tuple[Work, ...], uses: list[Use], j: int
    ) -> None:
        """Each step works on one block of keys and values while the next is on its way."""
        b, job = self.b, self.job
        tensor = f"kv.{tag}"  # own block and those that come: version 1 of it on every rank
        block = b.take("kv", ring.size_bytes, "context", job.dtype, tensor, spare=1)
        self._op(f"kv.{tag}", "kv", (), [uses[0], ("kv", block, "write")], "kv", layer, j)
        out = uses[1]
        for step in range(ring.num_steps):
            after = None
            if step + 1 < ring.num_steps:
                after = b.take("kv", ring.size_bytes, "context", job.dtype, tensor, spare=1)
                label = b.label("ring", layer, microbatch=j)
                b.communicate(f"ring_send.{tag}.{step}", "send", ("cp",), "cp.send",
                              [("kv", block, "read")], label, 1)  # fmt: skip
                b.communicate(f"ring_recv.{tag}.{step}", "recv", ("cp",), "cp.recv",
                              [("kv", after, "write")], label, -1)  # fmt: skip
            mode: Mode = "update" if step else "write"
            operands: list[Use] = [
                uses[0],
                (out[0], out[1], mode),
                ("kv", block, "read"),
                *uses[2:],
            ]
            if step:  # what is saved is there since the first step
                operands = [o for o in operands if o[2] != "write"]
            self._op(
                f"core.{tag}.{step}",
                f"core.{'b' if tag[0] == 'b' else 'f'}",
                works,
                operands,
                "core",
                layer,
                j,
            )
            b.give_back("kv", block)
            if after is not None:
                block = after

    # What is kept.

    def _save(self, layer: int, j: int, *, inputs: bool) -> list[Use]:
        found: list[Use] = []
        for part in self.parts.parts:
            found += self._keep(layer, part, j, again=False, inputs=inputs)[0]
        return found

    def _keep(
        self, layer: int, part: Part, j: int, *, again: bool, inputs: bool
    ) -> tuple[list[Use], list[tuple[str, Held]]]:
        """A slot for what a part keeps; of a chunk's first layer the input is the chunk's."""
        if again:
            held = self.b.take(f"again.{part.name}", part.full_bytes, "activation", self.job.dtype)
            return [(f"again.{part.name}", held, "write")], [(part.name, held)]
        size = part.saved_bytes
        first = part is self.parts.parts[0]
        if first and not inputs:
            size -= self.parts.input_bytes
        if size <= 0:
            return [], []
        pool = f"saved.{part.name}" + ("" if inputs or not first else ".first")
        held = self.b.take(pool, size, "activation", self.job.dtype)
        self._saved[layer, part.name, j] = held
        return [(f"saved.{layer}.{part.name}", held, "write")], []

    def _kept(self, layer: int, j: int) -> list[Held]:
        keys = [(layer, part.name, j) for part in self.parts.parts]
        return [self._saved[key] for key in keys if key in self._saved]

    def _release(self, layer: int, j: int) -> None:
        for part in self.parts.parts:
            held = self._saved.pop((layer, part.name, j), None)
            if held is not None:
                self.b.give_back(held.place.slot.rpartition(".")[0], held)

    def _put_off_bytes(self) -> int:
        """Gradients of all products' outputs, which those of weights need."""
        work = self.job.work
        shape = self.job.shape
        widths = (
            work.d_qkv + 2 * shape.d_model + (3 if shape.gated else 2) * -(-shape.d_ff // work.tp)
        )
        return work.tokens * widths * work.itemsize

    # Small things.

    def _op(
        self,
        op_id: str,
        call: str,
        works: tuple[Work, ...],
        uses: list[Use],
        kind: str,
        layer: int,
        j: int,
    ) -> None:
        self.b.compute(op_id, call, works, uses, self.b.label(kind, layer, microbatch=j))

    def _talk(self, talk: Talk, tag: str, collective, uses: list[Use]) -> None:  # type: ignore[no-untyped-def]
        self.b.communicate(f"{talk.axis}.{tag}", collective, (talk.axis,), talk.axis, uses,
                           self.b.label(talk.axis))  # fmt: skip

    def _flow(self, size_bytes: int) -> tuple[Held, str]:
        pool = f"flow.{size_bytes}"
        return self.b.take(pool, size_bytes, "activation", self.job.dtype), pool

    def _stream(self) -> Held:
        return self.b.take("stream", self.parts.input_bytes, "activation", self.job.dtype)

    def _all(self, kind: str) -> tuple[Work, ...]:
        works = self.parts.work()
        if kind != "forward":
            works = works[::-1]
        return tuple(one for work in works for one in getattr(work, kind))

    def _names(self, layer: int) -> list[str]:
        return [str(layer), *([f"{layer}.experts"] if self.experts else [])]

    def _read(self, layer: int, which: str = "all") -> list[Use]:
        names = self._names(layer)
        if which != "all":
            names = [names[-1] if which == "experts" else names[0]]
        return [self.weights.read(name) for name in names]

    def _gradients(self, layer: int) -> list[Use]:
        return [self.weights.gradient(name) for name in self._names(layer)]

    def _gather(self, unit: Sequence[int], tag: str) -> None:
        for layer in unit if self.sharded else ():
            for name in self._names(layer):
                self.weights.gather(name, tag)

    def _drop(self, unit: Sequence[int], *, keep: bool = False) -> None:
        for layer in unit if self.sharded and not keep else ():
            for name in self._names(layer):
                self.weights.drop(name)

    def _after(self, unit: Sequence[int], tag: str, *, last: bool) -> None:
        for layer in reversed(unit):
            for name in self._names(layer):
                self.weights.after_backward(name, tag, last=last)


def _units(span: range, fine: bool) -> list[tuple[int, ...]]:
    """Layers that have ops together."""
    return [(layer,) for layer in span] if fine else [tuple(span)]


def _times(works: Sequence[Work], count: int) -> tuple[Work, ...]:
    """The work of so many like layers."""
    if count == 1:
        return tuple(works)
    return tuple(
        work.model_copy(
            update={
                "flops": work.flops * count,
                "hbm_bytes": work.hbm_bytes * count,
                "launches": work.launches * count,
            }
        )
        for work in works
    )


def _out_bytes(
    job: Job, element: Compute | Ring | Talk, left: Sequence[Compute | Ring | Talk]
) -> int:
    """Of what an element makes: what the next one takes, or all hidden states."""
    if isinstance(element, Talk):
        return element.out_bytes
    return left[0].in_bytes if isinstance(left[0], Talk) else whole(job)


def _back_bytes(
    job: Job, element: Compute | Ring | Talk, left: Sequence[Compute | Ring | Talk]
) -> int:
    if isinstance(element, Talk):
        return element.in_bytes
    return left[0].out_bytes if isinstance(left[0], Talk) else whole(job)
