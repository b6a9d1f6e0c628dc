"""What a layer does on one rank, part by part: computation, and what it says in between."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from twinstream.models.layouts.job import Job
from twinstream.models.layouts.own_work import OwnWork
from twinstream.models.layouts.saved import hidden_bytes, saved_tensors, stored_hidden_bytes
from twinstream.models.layouts.work import PartWork
from twinstream.schedule.cost import Work

Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]


@dataclass(frozen=True)
class LayerCompute:
    """Work of a part; the `suffix` is of the layer's group whose parameters it reads.

    The gradients of its weights need `gradient_bytes`: the gradients of its products' outputs.
    """

    name: str
    work: PartWork
    gradient_bytes: int = 0
    suffix: Literal["", ".experts"] = ""


@dataclass(frozen=True)
class Ring:
    """Attention's core around a ring: in each step keys and values of `size_bytes` go on.

    In backward their gradients so far go along, as many bytes again.
    """

    name: str
    step: PartWork
    num_steps: int
    size_bytes: int

    def sent_bytes(self, *, backward: bool) -> int:
        """Of what goes on in a step."""
        return self.size_bytes * (2 if backward else 1)


@dataclass(frozen=True)
class CollectiveElement:
    """A collective between computations, forward and, in backward, its transpose.

    It is along `axis` and those `beside` it, on the queue of `axis`.
    """

    axis: str
    forward: Collective | None
    backward: Collective | None
    out_bytes: int
    in_bytes: int
    beside: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that it is along."""
        return (self.axis, *self.beside)


Element = LayerCompute | Ring | CollectiveElement


@dataclass(frozen=True)
class Part:
    """A sublayer: its elements in the order of the forward pass, and what it keeps.

    `again` is what selective recompute repeats, at the element that has attention's core.
    `gathered_bytes` is what is gathered once more in backward, for gradients of weights.
    """

    name: str
    elements: tuple[Element, ...]
    saved_bytes: int
    full_bytes: int
    gathered_bytes: int


@dataclass(frozen=True)
class LayerParts:
    """The parts of a layer; `plain` if nothing is said inside it.

    `input_bytes` is the hidden state between layers as one rank has it. Of the saved bytes of
    the first part, or all of them with full recompute, so many are that input. `recomputed` is
    what that repeats of a layer that is one op.
    """

    parts: tuple[Part, ...]
    plain: bool
    input_bytes: int
    full_recompute: bool
    recomputed: tuple[Work, ...] = ()

    @property
    def full_bytes(self) -> int:
        """What all parts keep where nothing is recomputed."""
        return sum(part.full_bytes for part in self.parts)

    @property
    def gradient_bytes(self) -> int:
        """What the gradients of all weights need beside that."""
        elements = [element for part in self.parts for element in part.elements]
        return sum(one.gradient_bytes for one in elements if isinstance(one, LayerCompute))

    def work(self) -> tuple[PartWork, ...]:
        """All computation, in order."""
        return tuple(
            element.work
            for part in self.parts
            for element in part.elements
            if isinstance(element, LayerCompute)
        )


def layer_parts(job: Job) -> LayerParts:
    """The parts of every layer of a job."""
    work, layout = job.work, job.layout
    recompute = layout.recompute
    if isinstance(work, OwnWork):
        size = stored_hidden_bytes(work)
        saved, most = work.block_saved_bytes(recompute), work.block_saved_bytes("none")
        block = Part("block", (LayerCompute("block", work.block()),), saved, most, 0)
        again = work.recomputes().get(recompute, ())
        return LayerParts((block,), True, size, bool(again), again)
    parts = [_part(job, "attention", _attention(job))]
    parts.append(_part(job, "mlp", _dense(job) if job.shape.experts is None else _experts(job)))
    plain = layout.tp == layout.cp == layout.ep == 1
    found = LayerParts(tuple(parts), plain, stored_hidden_bytes(work), recompute == "full")
    again = tuple(one for part in found.work() for one in part.forward)
    return replace(found, recomputed=again if found.full_recompute else ())


def whole(job: Job) -> int:
    """Bytes of the hidden state of all tokens that a rank's matrix products see."""
    return hidden_bytes(job.work)


def around(job: Job, elements: Sequence[Element], width: int | None = None) -> tuple[Element, ...]:
    """A column-parallel product and a row-parallel one, with what tensor parallelism says.

    Args:
        width: columns that the first reads; None: the model's.
    """
    if job.layout.tp == 1:
        return tuple(elements)
    d = job.shape.d_model
    full, kept = whole(job), stored_hidden_bytes(job.work)
    read, own = full * (width or d) // d, kept * (width or d) // d
    if job.layout.sequence_parallel:
        before = CollectiveElement("tp", "all_gather", "reduce_scatter", read, own)
        after = CollectiveElement("tp", "reduce_scatter", "all_gather", kept, full)
    else:
        before = CollectiveElement("tp", None, "all_reduce", read, read)
        after = CollectiveElement("tp", "all_reduce", None, full, full)
    return (before, *elements, after)


def _part(job: Job, name: Literal["attention", "mlp"], elements: tuple[Element, ...]) -> Part:
    work, recompute = job.work, job.layout.recompute
    saved = sum(one.size_bytes for one in saved_tensors(work, name, recompute))
    full = sum(one.size_bytes for one in saved_tensors(work, name, "none"))
    columns = work.d_columns if name == "attention" else job.shape.d_model
    gathered = whole(job) * columns // job.shape.d_model if work.sequence_parallel else 0
    return Part(name, elements, saved, full, gathered)


def _attention(job: Job) -> tuple[Element, ...]:
    work, cp = job.work, job.layout.cp
    selective = job.layout.recompute in ("selective", "mlp")
    again = work.core_attention_again() if selective else ()
    latents = work.latents()
    ahead = [LayerCompute("latents", latents, work.local_tokens * work.d_columns * work.itemsize)]
    ahead = ahead if latents.forward else []
    if cp == 1:
        whole_part = work.attention()
        size = _gradient_bytes(job, work.tokens, work.d_qkv + job.shape.d_model)
        computed = LayerCompute("attention", _repeating(whole_part, again), size)
        return (*ahead, *around(job, [computed], work.d_columns))
    (step, *_) = work.core_attention_steps()
    repeated = step.forward if again else ()
    ring = Ring(
        "core", PartWork(step.forward, (*repeated, *step.backward)), cp,
        work.tokens * (work.d_kv + work.d_v) * work.itemsize,
    )  # fmt: skip
    before = LayerCompute("attention_before", work.attention_before_core(),
                     _gradient_bytes(job, work.tokens, work.d_qkv))  # fmt: skip
    after = LayerCompute("attention_after", work.attention_after_core(),
                    _gradient_bytes(job, work.tokens, job.shape.d_model))  # fmt: skip
    return (*ahead, *around(job, [before, ring, after], work.d_columns))


def _repeating(part: PartWork, again: tuple[Work, ...]) -> PartWork:
    return PartWork(part.forward, (*again, *part.backward_input), part.backward_weight)


def _dense(job: Job) -> tuple[Element, ...]:
    work = job.work
    size = _ffn_gradient_bytes(job, work.tokens, work.d_ff)
    again: tuple[Work, ...] = ()
    if job.layout.recompute == "mlp":
        again = work.mlp_again()
        size += sum(one.size_bytes for one in saved_tensors(work, "mlp", "selective"))
        size -= sum(one.size_bytes for one in saved_tensors(work, "mlp", "mlp"))
    return around(job, [LayerCompute("mlp", _repeating(work.mlp(), again), size)])


def _gradient_bytes(job: Job, rows: int, width: int) -> int:
    return rows * width * job.work.itemsize


def _ffn_gradient_bytes(job: Job, rows: int, d_ff: int) -> int:
    """Of the outputs of up (and gate) and of down."""
    return _gradient_bytes(job, rows, (2 if job.shape.gated else 1) * d_ff + job.shape.d_model)


def _experts(job: Job) -> tuple[Element, ...]:
    """Router on the rank's own tokens, to the experts' ranks and back; experts split over tp."""
    work, layout = job.work, job.layout
    d_bytes = job.shape.d_model * work.itemsize
    routed = work.routed_tokens * d_bytes
    assert job.shape.experts is not None
    count = job.shape.experts.count
    router = LayerCompute("router", work.router(), _gradient_bytes(job, work.local_tokens, count))
    ffn_bytes = _ffn_gradient_bytes(job, work.expert_tokens, work.expert_d_ff)
    if work.shared_d_ff:
        ffn_bytes += _ffn_gradient_bytes(job, work.tokens, work.shared_d_ff)
    over_tp = layout.tp if work.expert_tp == 1 else 1  # ranks of tp that have experts of their own
    axes = [name for name, size in (("ep", layout.expert_replicas), ("tp", over_tp)) if size > 1]
    to = []
    if axes:
        sent = work.sent_rows * d_bytes
        to = [CollectiveElement(axes[0], "all_to_all", "all_to_all", sent, sent, tuple(axes[1:]))]
    gather, scatter = [], []
    if work.expert_tp > 1 and work.sequence_parallel:
        gather = [
            CollectiveElement("tp", "all_gather", "reduce_scatter", routed * layout.tp, routed)
        ]
        scatter = [
            CollectiveElement("tp", "reduce_scatter", "all_gather", routed, routed * layout.tp)
        ]
    elif work.expert_tp > 1:
        summed = whole(job)  # once each token's experts are put together
        gather = [CollectiveElement("tp", None, "all_reduce", summed, summed)]
        scatter = [CollectiveElement("tp", "all_reduce", None, summed, summed)]
    experts = LayerCompute("experts", work.experts(), ffn_bytes, ".experts")
    back = to or (work.expert_tp > 1 and work.sequence_parallel)
    combine = [LayerCompute("combine", PartWork())] if back else []  # the experts have its work
    return (router, *to, *gather, experts, *scatter, *to, *combine)
