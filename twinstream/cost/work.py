"""What a run computes and moves on a mesh of devices, as davidsj/ml_par_sim counts it.

Arrays go by the letters of their indices: the queries are BLETHK, the weights that make them LEDHK.

B sequences of a batch      L layers                  E experts
T tokens at an expert       D width between layers    F inner width of the feed-forward network
H query heads               G key and value heads     K width of a head
S tokens attended to        R experts of these        J all of H and F, for one sum over both
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import Annotated, Any

from twinstream.cost.bill import CostError
from twinstream.models.presets import load_model
from twinstream.models.spec import ModelSpec
from twinstream.schedule.node import Node, quantity, size

_MOST_TOKENS_PER_EXPERT = 4096 * 2048
_LEAST_MICRO_BATCHES_PER_STAGE = 4
_LEAST_MATMUL_SIZE = 1024


class WorkAxis(StrEnum):
    """An axis of the mesh, outermost (over the slowest links) first."""

    PIPE = "pipe"
    EXPERT = "exp"
    DATA = "data"
    SEQUENCE = "seq"
    TENSOR_EXTERNAL = "tensor_ext"
    TENSOR_INTERNAL = "tensor_int"


class CountedRun(Node):
    """A decoder, the tokens that it is trained on, and the devices along each axis of a mesh.

    Each expert is a whole layer, attention and feed-forward network. Every token is at one expert
    at a time, and attends to all tokens of its sequence, at whatever expert they are. Embedding,
    head, norms, biases and router are not counted. With `attention_first` the feed-forward network
    takes the output of attention, which has then to be complete; otherwise both take the same
    input, and their outputs are added up as one. Replicas (`data`) keep weights in
    parts, as ZeRO-3.
    """

    num_layers: Annotated[int, size("Layers.")]
    d_model: Annotated[int, size("Width between layers.")]
    d_ff: Annotated[int, size("Inner width of the feed-forward network.")]
    num_heads: Annotated[int, size("Query heads.")]
    num_kv_heads: Annotated[int, size("Key and value heads.")] = 1
    head_dim: Annotated[int, size("Width of a head.")] = 64
    gated: bool = False
    num_experts: Annotated[int, size("Experts of every layer.")] = 1
    attention_first: bool = False
    dataset_tokens: Annotated[float, quantity("Tokens of the run.", "TOKENS")]
    batch_size: Annotated[int, size("Sequences of an optimizer step.")] = 2048
    seq_len: Annotated[int, size("Tokens of a sequence.")] = 2048
    recompute: bool = False
    pipe: Annotated[int, size("Pipeline stages.")] = 1
    exp: Annotated[int, size("Groups of experts.")] = 1
    data: Annotated[int, size("Replicas.")] = 1
    seq: Annotated[int, size("Slices of a sequence.")] = 1
    tensor_ext: Annotated[int, size("Parts of the width between layers.")] = 1
    tensor_int: Annotated[int, size("Parts of heads and inner width.")] = 1

    def degree(self, axis: WorkAxis) -> int:
        """Devices along an axis."""
        degree: int = getattr(self, axis.value)
        return degree

    @property
    def num_devices(self) -> int:
        """Devices of the whole mesh."""
        return prod(self.degree(axis) for axis in WorkAxis)

    @property
    def num_params(self) -> int:
        """Weights of all matrices of all experts."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        inner = (3 if self.gated else 2) * self.d_ff
        return self.num_layers * self.num_experts * self.d_model * (attention + inner)

    @property
    def num_batches(self) -> int:
        """Optimizer steps: the whole number nearest to the dataset, to even at a half."""
        return round(self.dataset_tokens / (self.batch_size * self.seq_len))


def model_of_layers(name: str, seq_len: int) -> ModelSpec:
    """Return a model by name whose experts, if it has any, are none beside attention.

    Raises:
        CostError: the model has experts, which here are whole layers.
        TwinstreamError: there is none of the name, or it is not supported.
    """
    spec = load_model(name, longest=seq_len)
    if spec.experts is not None:
        raise CostError(
            f"the {spec.experts.count} experts of {spec.name} share attention, and here an "
            "expert is a whole layer: twinstream plan --cluster knows them"
        )
    return spec


def counted_sizes(spec: ModelSpec) -> dict[str, Any]:
    """Return the sizes of a model as `CountedRun` has them."""
    names = ("num_layers", "d_model", "d_ff", "num_heads", "num_kv_heads", "head_dim", "gated")
    return {name: getattr(spec, name) for name in names} | {"attention_first": True}


def micro_batch_sizes(run: CountedRun) -> tuple[int, ...]:
    """Return the sequences of a micro-batch, over all replicas, that keep devices busy, ascending.

    Raises:
        CostError: a rule of thumb forbids the run: it keeps gradient noise and the pipeline's
            bubble small, and matmuls large.

    Source: the bounds are those of davidsj/ml_par_sim, transformer.py.
    """
    batch, tokens = run.batch_size, run.seq_len // run.num_experts
    smallest = run.data * -(-_LEAST_MATMUL_SIZE * run.seq // tokens)
    least_of_pipe = _LEAST_MICRO_BATCHES_PER_STAGE * run.pipe if run.pipe > 1 else 1
    largest, of_a_replica = batch // least_of_pipe, batch // run.data
    possible = (run.data * n for n in range(1, of_a_replica + 1) if of_a_replica % n == 0)
    sizes = tuple(one for one in possible if smallest <= one <= largest)
    widths = (
        ("tensor_int", "d_ff", run.d_ff),
        ("tensor_int", "heads", run.num_heads * run.head_dim),
        ("tensor_ext", "d_model", run.d_model),
    )
    at_most = [
        ("gradient noise: tokens of a batch at an expert", batch * tokens,
         _MOST_TOKENS_PER_EXPERT, "lower batch_size"),
        ("pipeline bubble: micro-batches a replica for 4 a stage", least_of_pipe, of_a_replica,
         "raise batch_size, or lower pipe or data"),
        (f"arithmetic intensity: sequences for matmuls of {_LEAST_MATMUL_SIZE:,} tokens", smallest,
         largest, "raise batch_size, or lower data, seq or pipe"),
        *((f"arithmetic intensity: {axis} over the {width:,} channels of {what}",
           getattr(run, axis), width // _LEAST_MATMUL_SIZE, f"lower {axis}")
          for axis, what, width in widths),
    ]  # fmt: skip
    for what, value, bound, advice in at_most:
        if value > bound:
            raise CostError(f"{what} would be {value:,}, and should be at most {bound:,}: {advice}")
    if not sizes:
        raise CostError(
            f"arithmetic intensity: no size from {smallest:,} to {largest:,} divides a batch of "
            f"{batch:,} and is a multiple of data {run.data:,}: choose a batch_size with more "
            "divisors"
        )
    return sizes


_AXIS_OF = {
    "B": WorkAxis.DATA, "L": WorkAxis.PIPE, "E": WorkAxis.EXPERT, "T": WorkAxis.SEQUENCE,
    "S": WorkAxis.TENSOR_EXTERNAL, "D": WorkAxis.TENSOR_EXTERNAL, "F": WorkAxis.TENSOR_INTERNAL,
    "H": WorkAxis.TENSOR_INTERNAL, "G": WorkAxis.TENSOR_INTERNAL, "J": WorkAxis.TENSOR_INTERNAL,
}  # fmt: skip
_ONE_AT_A_TIME = "BL"  # a device works on one sequence and one layer at a time
_NAMES = {
    "B": "sequences of a batch", "L": "layers", "E": "experts", "T": "tokens at an expert",
    "S": "tokens at an expert", "D": "channels of d_model", "F": "channels of d_ff",
    "H": "heads", "G": "key and value heads", "J": "heads and channels of d_ff together",
}  # fmt: skip
_KEEP_PARTS = (WorkAxis.DATA, WorkAxis.SEQUENCE)  # of the weights, along these axes


def parts_of(whole: int, parts: int, *, what: str, by: str) -> int:
    """The size of one part.

    Raises:
        CostError: the whole does not come apart evenly.

    >>> parts_of(96, 8, what="layers", by="pipe")
    12
    """
    if whole % parts:
        raise CostError(
            f"{whole:,} {what} do not come apart in {parts:,} equal parts: {by} needs to be a "
            f"divisor of {whole:,}"
        )
    return whole // parts


def _none() -> dict[WorkAxis, float]:
    return dict.fromkeys(WorkAxis, 0.0)


@dataclass
class PassWork:
    """FLOPs of one pass, and values (not bytes) by the axis that they cross, of all devices."""

    flop: float = 0.0
    sent: dict[WorkAxis, float] = field(default_factory=_none)
    received: dict[WorkAxis, float] = field(default_factory=_none)

    def add(self, other: "PassWork", times: float = 1) -> None:
        """Count another pass, so often."""
        self.flop += times * other.flop
        for axis in WorkAxis:
            self.sent[axis] += times * other.sent[axis]
            self.received[axis] += times * other.received[axis]


class BatchWork:
    """Forward and backward of one batch: weights gathered, then every layer for every token.

    Raises:
        CostError: an index or an array does not come apart evenly along its axes.
    """

    def __init__(self, run: CountedRun) -> None:
        self._run = run
        self.forward, self.backward = PassWork(), PassWork()
        tokens = parts_of(run.seq_len, run.num_experts, what="tokens", by="num_experts")
        self._size = {
            "B": run.batch_size, "L": run.num_layers, "E": run.num_experts, "T": tokens,
            "S": tokens, "D": run.d_model, "F": run.d_ff, "H": run.num_heads,
            "G": run.num_kv_heads, "J": run.num_heads + run.d_ff, "R": run.num_experts,
            "K": run.head_dim,
        }  # fmt: skip
        self._local = dict(self._size)
        # One key head is there for all query heads; several lie with theirs.
        self._kv_heads = "G" if run.num_kv_heads > 1 else ""
        for index, axis in _AXIS_OF.items():
            if index != "G" or self._kv_heads:
                degree = run.degree(axis)
                part = parts_of(self._size[index], degree, what=_NAMES[index], by=axis.value)
                self._local[index] = 1 if index in _ONE_AT_A_TIME else part
        self._weights(run.gated)
        self._attention()
        if run.attention_first:
            self._all_reduce("BLETDH", "H")
        self._feed_forward(run.gated)
        # Two sums into one output are one sum over both: heads and inner width, end to end.
        last = ("BLETDF", "F") if run.attention_first else ("BLETDJ", "J")
        # Into the first stage and out of the last nothing is counted. Each layer routes anew, and
        # a token is as likely to go to one group of experts as to any other.
        to_next = (run.pipe - 1) / run.num_layers
        elsewhere = (1 - to_next) * (1 - 1 / run.exp)
        self._all_reduce(*last, crossings={WorkAxis.PIPE: to_next, WorkAxis.EXPERT: elsewhere})

    def _weights(self, gated: bool) -> None:
        """Weights are kept in parts; each device gathers those it works with, once a batch."""
        for _ in ("query", "output"):
            self.spread("LEDHK", *_KEEP_PARTS)
        for _ in ("key", "value"):
            if self._kv_heads:
                self.spread("LEDGK", *_KEEP_PARTS)
            else:
                self.spread("LEDK", *_KEEP_PARTS, WorkAxis.TENSOR_INTERNAL)
        for _ in range(3 if gated else 2):
            self.spread("LEDF", *_KEEP_PARTS)

    def _attention(self) -> None:
        """Up to the products with the output projection, which are not yet summed over the heads.

        Every query meets every key, later ones too: no half of the scores is left out.
        """
        self._matmul("BLETDHK", "D")  # queries
        for _ in ("key", "value"):
            self.multiply(f"BLETDK{self._kv_heads}")
            self.add_up(f"BLETDK{self._kv_heads}", "D")
            # Tokens go where the summed width was; from there to all that attend to them.
            self.spread(f"BLRSK{self._kv_heads}", WorkAxis.EXPERT, WorkAxis.SEQUENCE)
        scores = "BLETHRS"
        self._matmul(f"{scores}K", "K")
        self.add_up(scores, "R")  # of the softmax
        self._all_reduce("BLETHS", "S")
        self.multiply(scores)
        self.multiply(f"{scores}K")  # values, weighted
        self.add_up(f"{scores}K", "R")
        self._all_reduce("BLETHSK", "S")
        self._matmul("BLETDHK", "K")

    def _feed_forward(self, gated: bool) -> None:
        """Up to the products with the second matrix, not yet summed over the inner width."""
        for _ in range(2 if gated else 1):
            self._matmul("BLETDF", "D")
        if gated:
            self.multiply("BLETF")
        self.multiply("BLETDF")

    def _matmul(self, indices: str, summed: str) -> None:
        self.multiply(indices)
        self._all_reduce(indices, summed)

    def _all_reduce(
        self, indices: str, summed: str, crossings: Mapping[WorkAxis, float] | None = None
    ) -> None:
        """Sum an index out, and give the sums to all along its axis."""
        self.add_up(indices, summed)
        over = (_AXIS_OF[summed],) if summed in _AXIS_OF else ()
        self.spread(indices.replace(summed, ""), *over, crossings=crossings)

    def multiply(self, indices: str) -> None:
        """Multiply two arrays that have these indices between them, on every device with both.

        Backward makes the gradients of both factors, and adds each to what others contribute to
        it: four FLOPs for one.
        """
        products = self._count(indices) * self._copies(indices)
        self.forward.flop += products
        self.backward.flop += 4 * products

    def add_up(self, indices: str, summed: str) -> None:
        """Sum an index out; each device ends with a part of the sums.

        Every device along its axis but the one that keeps a sum sends its partial sum of it. A
        gradient of a sum is that of its terms: sent once, received by the others.
        """
        sums = self._count(indices.replace(summed, "")) * self._copies(indices)
        self.forward.flop += sums * (self._size[summed] - 1)
        if (axis := _AXIS_OF.get(summed)) is not None:
            degree = self._run.degree(axis)
            self.forward.sent[axis] += sums * (degree - 1)
            self.backward.sent[axis] += sums if degree > 1 else 0
            for one in (self.forward, self.backward):
                one.received[axis] += sums * (degree - 1)

    def spread(
        self, indices: str, *over: WorkAxis, crossings: Mapping[WorkAxis, float] | None = None
    ) -> None:
        """Give all devices along some axes all values of an array that lies in parts along them.

        Forward, a value is sent once, to all, and every device receives what it lacks. Backward,
        the gradients of all copies differ: each is sent, received and added. What crosses several
        axes is charged to the outermost first, to the next what it adds to it.

        Args:
            crossings: share of the values that change their place on an axis for good on the way,
                to the next stage or another expert; what moves in one go with another axis is
                charged once.

        Raises:
            CostError: the array does not come apart evenly.
        """
        along = {axis: self._run.degree(axis) for axis in WorkAxis if axis in over}
        here, parts = prod(self._local[index] for index in indices), prod(along.values())
        if here % parts:
            flags = " x ".join(axis.value for axis, degree in along.items() if degree > 1)
            raise CostError(
                f"{here:,} values that a device has of an array of a layer do not come apart in "
                f"{parts:,} equal parts ({flags}): lower these, or choose other divisors"
            )
        crossings = crossings or {}
        values = self._count(indices)
        held = values * self._copies(indices, along)
        reached = {axis: held * share for axis, share in crossings.items()}
        for axis, share in crossings.items():
            self.forward.sent[axis] += values * share
        outermost = next((axis for axis, degree in along.items() if degree > 1), None)
        if outermost is not None:
            self.forward.sent[outermost] += values * (1 - sum(crossings.values()))
        holders = 1
        for axis, degree in along.items():
            reached[axis] = reached.get(axis, 0) + held * holders * (degree - 1)
            holders *= degree
        for axis, arrived in reached.items():
            self.forward.received[axis] += arrived
            self.backward.sent[axis] += arrived
            self.backward.received[axis] += arrived
            self.backward.flop += arrived

    def _count(self, indices: str) -> int:
        """Values of an array, each counted once."""
        return prod(self._size[index] for index in indices)

    def _copies(self, indices: str, also: Mapping[WorkAxis, int] | None = None) -> int:
        """Devices that hold the same values: along axes of none of its indices, nor of `also`."""
        axes = {_AXIS_OF[index] for index in indices if index in _AXIS_OF} | {*(also or {})}
        return prod(self._run.degree(axis) for axis in WorkAxis if axis not in axes)


@dataclass(frozen=True)
class RunWork:
    """What all devices compute and move in a whole run: both passes, recompute in backward."""

    num_params: int
    num_batches: int
    num_tokens: int
    num_devices: int
    forward: PassWork
    backward: PassWork

    @property
    def total(self) -> PassWork:
        """Both passes together."""
        both = PassWork()
        both.add(self.forward)
        both.add(self.backward)
        return both


def work_of(run: CountedRun) -> RunWork:
    """Count a run.

    Raises:
        CostError: the sizes do not fit together.
    """
    batch, num_batches = BatchWork(run), run.num_batches
    if num_batches == 0:
        raise CostError(
            f"dataset_tokens {run.dataset_tokens:g} is no more than half a batch of "
            f"{run.batch_size * run.seq_len:,} tokens: raise it, or lower batch_size"
        )
    forward, backward = PassWork(), PassWork()
    forward.add(batch.forward, num_batches)
    backward.add(batch.backward, num_batches)
    if run.recompute:
        backward.add(forward)
    num_tokens = num_batches * run.batch_size * run.seq_len
    return RunWork(run.num_params, num_batches, num_tokens, run.num_devices, forward, backward)
