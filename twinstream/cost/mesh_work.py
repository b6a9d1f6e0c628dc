"""What a batch computes and moves on a mesh of devices, as davidsj/ml_par_sim counts it.

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
from typing import Annotated

from twinstream.cost.bill import CostError
from twinstream.models.spec import ModelSpec, layer_parameters, norm_parameters
from twinstream.schedule.node import Node, quantity, size


class WorkAxis(StrEnum):
    """An axis of the mesh, outermost (over the slowest links) first."""

    PIPE = "pipe"
    EXPERT = "exp"
    DATA = "data"
    SEQUENCE = "seq"
    TENSOR_EXTERNAL = "tensor_ext"
    TENSOR_INTERNAL = "tensor_int"

    @property
    def flag(self) -> str:
        """The option that sets its degree."""
        return f"--p-{self.value.replace('_', '-')}"


class WorkMesh(Node, title="Mesh", populate_by_name=True):
    """Devices along each axis: each is a GPU, or a cluster of them with free communication."""

    pipe: Annotated[int, size("Pipeline stages.", "p_pipe")] = 1
    exp: Annotated[int, size("Groups of experts.", "p_exp")] = 1
    data: Annotated[int, size("Replicas; weights in parts, as ZeRO-3.", "p_data")] = 1
    seq: Annotated[int, size("Slices of a sequence.", "p_seq")] = 1
    tensor_ext: Annotated[int, size("Parts of the width between layers.", "p_tensor_ext")] = 1
    tensor_int: Annotated[int, size("Parts of heads and inner width.", "p_tensor_int")] = 1

    def degree(self, axis: WorkAxis) -> int:
        """Devices along an axis."""
        degree: int = getattr(self, axis.value)
        return degree

    @property
    def num_devices(self) -> int:
        """Devices of the whole mesh."""
        return prod(self.degree(axis) for axis in WorkAxis)


class Decoder(Node):
    """A decoder in which each expert is a whole layer: attention and feed-forward network.

    Every token is at one expert at a time, and attends to all tokens of its sequence, at whatever
    expert they are. Embedding, head, norms, biases and router are not counted.

    Fields:
        spec: sizes of one expert's layers; its vocabulary counts nothing.
        num_experts: experts of every layer; 1 is a dense model.
        attention_first: the feed-forward network takes the output of attention, which has then to
            be complete; otherwise both take the same input, and their outputs are added up as one.
    """

    spec: ModelSpec
    num_experts: int = 1
    attention_first: bool = False

    @property
    def num_params(self) -> int:
        """Weights of all matrices of all experts."""
        others = {"biases": False, "qkv_bias": False, "qk_norm": False}
        layer = layer_parameters(self.spec.model_copy(update=others))
        matrices = layer.total - 2 * norm_parameters(self.spec.model_copy(update=others))
        return self.spec.num_layers * self.num_experts * matrices

    @property
    def asked(self) -> dict[str, int | bool]:
        """What counts of the sizes."""
        spec = self.spec
        return {
            "num_layers": spec.num_layers, "d_model": spec.d_model, "d_ffn": spec.d_ff,
            "num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads,
            "d_head": spec.head_dim, "num_experts": self.num_experts, "gated": spec.gated,
            "multi_query": spec.num_kv_heads == 1, "attention_first": self.attention_first,
        }  # fmt: skip

    @property
    def num_params_per_token(self) -> float:
        """Weights that one token meets: those of one expert a layer."""
        return self.num_params / self.num_experts


class Batches(Node, title="Run", populate_by_name=True):
    """What a run trains on: the whole number of batches that is nearest to the dataset."""

    dataset_tokens: Annotated[
        float, quantity("Tokens of the run: 13e12.", "TOKENS", "dataset_size")
    ]
    batch_size: Annotated[int, size("Sequences of an optimizer step.")] = 2048
    seq_len: Annotated[int, size("Tokens of a sequence.")] = 2048

    @property
    def num_batches(self) -> int:
        """Optimizer steps of the run, rounded to even at a half."""
        return round(self.dataset_tokens / (self.batch_size * self.seq_len))

    @property
    def num_tokens(self) -> int:
        """Tokens of all batches."""
        return self.num_batches * self.batch_size * self.seq_len


_AXIS_OF = {
    "B": WorkAxis.DATA, "L": WorkAxis.PIPE, "E": WorkAxis.EXPERT, "T": WorkAxis.SEQUENCE,
    "S": WorkAxis.TENSOR_EXTERNAL, "D": WorkAxis.TENSOR_EXTERNAL, "F": WorkAxis.TENSOR_INTERNAL,
    "H": WorkAxis.TENSOR_INTERNAL, "G": WorkAxis.TENSOR_INTERNAL, "J": WorkAxis.TENSOR_INTERNAL,
}  # fmt: skip
_ONE_AT_A_TIME = "BL"  # a device works on one sequence and one layer at a time
_NAMES = {
    "B": "sequences of a batch", "L": "layers", "E": "experts", "T": "tokens at an expert",
    "S": "tokens at an expert", "D": "channels of --d-model", "F": "channels of --d-ffn",
    "H": "heads", "G": "key and value heads", "J": "heads and channels of --d-ffn together",
}  # fmt: skip
_KEEP_PARTS = (WorkAxis.DATA, WorkAxis.SEQUENCE)  # of the weights, along these axes


def parts_of(whole: int, parts: int, *, what: str, by: str) -> int:
    """The size of one part.

    Raises:
        CostError: the whole does not come apart evenly.

    >>> parts_of(96, 8, what="layers", by="--p-pipe")
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

    def __init__(self, decoder: Decoder, batches: Batches, mesh: WorkMesh) -> None:
        spec, self.mesh = decoder.spec, mesh
        self.forward, self.backward = PassWork(), PassWork()
        tokens = parts_of(batches.seq_len, decoder.num_experts, what="tokens", by="--num-experts")
        self._size = {
            "B": batches.batch_size, "L": spec.num_layers, "E": decoder.num_experts,
            "T": tokens, "S": tokens, "D": spec.d_model, "F": spec.d_ff, "H": spec.num_heads,
            "G": spec.num_kv_heads, "J": spec.num_heads + spec.d_ff,
            "R": decoder.num_experts, "K": spec.head_dim,
        }  # fmt: skip
        self._local = dict(self._size)
        # One key head is there for all query heads; several lie with theirs.
        self._kv_heads = "G" if spec.num_kv_heads > 1 else ""
        for index, axis in _AXIS_OF.items():
            if index != "G" or self._kv_heads:
                degree = mesh.degree(axis)
                part = parts_of(self._size[index], degree, what=_NAMES[index], by=axis.flag)
                self._local[index] = 1 if index in _ONE_AT_A_TIME else part
        self._weights(spec.gated)
        self._attention()
        if decoder.attention_first:
            self._all_reduce("BLETDH", "H")
        self._feed_forward(spec.gated)
        # Two sums into one output are one sum over both: heads and inner width, end to end.
        last = ("BLETDF", "F") if decoder.attention_first else ("BLETDJ", "J")
        # Into the first stage and out of the last nothing is counted. Each layer routes anew, and
        # a token is as likely to go to one group of experts as to any other.
        to_next = (mesh.pipe - 1) / spec.num_layers
        elsewhere = (1 - to_next) * (1 - 1 / mesh.exp)
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
            degree = self.mesh.degree(axis)
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
        along = {axis: self.mesh.degree(axis) for axis in WorkAxis if axis in over}
        here, parts = prod(self._local[index] for index in indices), prod(along.values())
        if here % parts:
            flags = " x ".join(axis.flag for axis, degree in along.items() if degree > 1)
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
        return prod(self.mesh.degree(axis) for axis in WorkAxis if axis not in axes)
