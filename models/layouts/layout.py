"""How a model and its batch are laid out over the ranks of a cluster, and which layouts can be."""

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.node import Node
from twinstream.schedule.numbers import Count, PositiveCount

ReplicaSum = Literal["rank_order", "library"]
Pipeline = Literal["gpipe", "1f1b", "interleaved", "ring", "zero_bubble"]
RUN_PIPELINES = tuple(name for name in get_args(Pipeline) if name != "zero_bubble")  # by ranks here
Exchange = Literal["all_gather", "ring"]
Recompute = Literal["auto", "none", "selective", "mlp", "experts", "attention", "full"]


class LayoutError(TwinstreamError):
    """A layout that cannot be; the message says why, with the numbers."""


class Layout(Node):
    """Degrees of parallelism, and what goes with them.

    Fields:
        tp: tensor parallel; with `sequence_parallel` norms and residuals are split over it too.
        parts: of ranks that run, in how many parts heads, the feed-forward network's width and the
            vocabulary are computed, whatever tp is; what they make is added up in their order, in
            float32. So every tp that divides it has the same bits. None: a part a rank, and the
            transport's own sums.
        cp: context parallel: each sequence is split. Keys and values go around a ring, or, by our
            kernels, each rank gathers those of all.
        cp_parts: of ranks that run, in how many parts a sequence is computed, whatever cp is; each
            is a slice and its mirror image. Gradients are added up by parts, in pairs. So every cp
            that divides it has the same bits where both are powers of two. None: a part a rank.
        cp_exchange: how our kernels exchange keys and values: each rank gathers those of all, or
            blocks of them go around a ring, and attention of a block runs beside the next.
        sliced_norms: of one rank of tp with `parts`: gradients of norms are added up slice by slice
            of a chunk's tokens, as `sequence_parallel` has them on several.
        pp: pipeline stages; `virtual_stages` of them on each rank (interleaved, ring).
        dp: data parallel replicas, GPUs / (tp cp pp); `ep` of them share the routed experts.
        etp: ranks that split each expert's width: tp (None), or 1, where `ep` ranks of tp x dp
            share the experts and no collective of tp is around them.
        tp_overlap: collectives of tp run in pieces beside the products around them (Megatron-LM's
            userbuffers): compute waits for `tp_exposed` of them, a number of the cluster.
        micro_batch: sequences of a microbatch on one replica.
        zero: 0 nothing is sharded over the replicas, 1 the optimizer's state, 2 gradients too,
            3 parameters too (FSDP), over `shard` ranks (None: all of dp and cp).
        recompute: selective runs the attention core again in backward, mlp that and the products
            into the dense FFN and its activation, full the whole layer; with auto the planner
            decides block by block (twinstream's own kernels; of others auto is none).
        dp_overlap: gradients are reduced beside the backward pass, and parameters gathered
            beside the forward; otherwise all at the end.
        stage_layers: layers of every virtual stage in the order of the model; None: as even as
            can be (`stages_of`).
        reduction: how ranks that run sum gradients over replicas: in `rank_order`, in float32 and
            with the same bits on any transport, or as the `library` of the transport does it.
        expert_imbalance: how many times the mean the busiest rank's experts get.
        expert_nodes: nodes over which `ep` ranks lie, where a token is sent once to each that has
            an expert of its (DeepEP), and not once to each expert (None).
        capacity_factor: how many times the mean a rank's experts take at most; what more comes is
            dropped (None: nothing is).
        offload: parameters, gradients, state and activations may be on the host.
    """

    tp: PositiveCount = 1
    parts: PositiveCount | None = None
    cp: PositiveCount = 1
    cp_parts: PositiveCount | None = None
    cp_exchange: Exchange = "all_gather"
    sliced_norms: bool = False
    pp: PositiveCount = 1
    dp: PositiveCount = 1
    ep: PositiveCount = 1
    etp: PositiveCount | None = None
    tp_overlap: bool = False
    virtual_stages: PositiveCount = 1
    micro_batch: PositiveCount = 1
    pipeline: Pipeline = "1f1b"
    zero: Literal[0, 1, 2, 3] = 1
    shard: PositiveCount | None = None
    recompute: Recompute = "none"
    sequence_parallel: bool = True
    dp_overlap: bool = True
    reduction: ReplicaSum = "rank_order"
    stage_layers: Annotated[tuple[Count, ...], Field(strict=False)] | None = None
    expert_imbalance: Annotated[float, Field(ge=1, le=1e3, allow_inf_nan=False)] = 1.0
    expert_nodes: PositiveCount | None = None
    capacity_factor: Annotated[float, Field(gt=0, le=1e3, allow_inf_nan=False)] | None = None
    offload: bool = False

    @model_validator(mode="before")
    @classmethod
    def _without_what_recipes_have(cls, given: Any) -> Any:
        """Documents of before had the gradients' dtype here."""
        if isinstance(given, dict):
            return {name: value for name, value in given.items() if name != "gradient_dtype"}
        return given

    @model_serializer(mode="wrap")
    def _without_what_is_usual(self, serialize: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Documents of before have no such fields."""
        document: dict[str, object] = serialize(self)
        usual = {
            "etp": self.etp is None, "tp_overlap": not self.tp_overlap, "parts": self.parts is None,
            "cp_parts": self.cp_parts is None, "cp_exchange": self.cp_exchange == "all_gather",
            "sliced_norms": not self.sliced_norms,
            "capacity_factor": self.capacity_factor is None,
            "expert_nodes": self.expert_nodes is None,
        }  # fmt: skip
        return {name: value for name, value in document.items() if not usual.get(name)}

    @property
    def expert_replicas(self) -> int:
        """Replicas that share the experts: those of `ep` that are not ranks of tp."""
        return self.ep if self.etp in (None, self.tp) else self.ep // self.tp

    @property
    def dropped_rows(self) -> tuple[float, float]:
        """Shares of the rows that experts get of which some are dropped, at least and at most.

        With a capacity C below the busiest rank's load s (times the mean) at least 1 - C, or what
        that one of `ep` ranks has too much; at most 1 - C / s, where few ranks get all rows and
        each as many as the busiest.

        >>> Layout(ep=8, expert_imbalance=1.6, capacity_factor=1.2).dropped_rows
        (0.05, 0.25)
        """
        most, taken = self.expert_imbalance, self.capacity_factor
        if taken is None or taken >= most:
            return 0.0, 0.0
        least = max(1 - taken, (most - taken) / self.ep)
        return round(least, 6), round(max(least, 1 - taken / most), 6)

    @property
    def num_parts(self) -> int:
        """In how many parts a block is computed by our kernels; 1 where it is one task."""
        return self.tp if self.parts is None else self.parts

    def with_sequence_parallel(self, is_asked: bool) -> Self:
        """The layout of ranks that run, with sequence parallelism where that is asked for."""
        alone = self.tp == 1
        sliced = is_asked and alone and self.num_parts > 1
        update = {"sequence_parallel": alone or is_asked, "sliced_norms": sliced}
        return self.model_copy(update=update)

    @property
    def token_slices(self) -> int:
        """In how many slices of a chunk's tokens our kernels have norms and hidden states between
        sums; 1 where these are of all tokens."""
        is_sliced = self.sequence_parallel if self.tp > 1 else self.sliced_norms
        return self.num_parts if is_sliced else 1

    @property
    def in_parts(self) -> bool:
        """Whether blocks are parts with collectives between them, be it on one rank."""
        return self.tp > 1 or self.parts is not None or self.splits_sequences

    @property
    def splits_sequences(self) -> bool:
        """Whether a sequence is computed in parts, be it on one rank."""
        return self.cp > 1 or self.cp_parts is not None

    @property
    def num_slices(self) -> int:
        """In how many slices a sequence is computed at least, two for each of its parts."""
        return 2 * (self.cp if self.cp_parts is None else self.cp_parts)

    @property
    def num_gpus(self) -> int:
        """GPUs of the layout."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def text(self) -> str:
        """The layout in a few words: what differs from one GPU, and how replicas are sharded.

        >>> Layout(tp=8, pp=4, dp=16, virtual_stages=5, pipeline="interleaved").text
        'tp8 pp4x5 dp16 interleaved zero1'
        """
        stages = f"pp{self.pp}" + (f"x{self.virtual_stages}" if self.virtual_stages > 1 else "")
        words = {
            f"tp{self.tp}": self.tp > 1, f"parts{self.parts}": self.parts is not None,
            f"cp{self.cp}": self.cp > 1, f"cp_parts{self.cp_parts}": self.cp_parts is not None,
            self.cp_exchange: self.cp_exchange == "ring",
            "sliced_norms": self.sliced_norms, stages: self.pp > 1,
            f"dp{self.dp}": self.dp > 1 or self.num_gpus == 1, f"ep{self.ep}": self.ep > 1,
            f"etp{self.etp}": self.etp not in (None, self.tp),
            f"nodes{self.expert_nodes}": self.expert_nodes is not None,
            f"capacity{self.capacity_factor or 0:g}": self.capacity_factor is not None,
            f"mb{self.micro_batch}": self.micro_batch > 1, self.pipeline: self.pp > 1,
            f"zero{self.zero}": self.dp * self.cp > 1,
            f"recompute-{self.recompute}": self.recompute not in ("auto", "none"),
        }  # fmt: skip
        return " ".join(word for word, is_told in words.items() if is_told)

    @property
    def shards(self) -> int:
        """Over how many ranks ZeRO shards."""
        return self.shard or self.dp * self.cp


def stages_of(layout: Layout, num_layers: int) -> tuple[range, ...]:
    """The layers of every virtual stage, in the order of the model; stage g is on rank g % pp.

    As the layout says; else equally many; where they do not divide, embedding and head count as a
    layer each if that divides, else the first stages have one more.

    Raises:
        LayoutError: there are fewer layers than stages, or the layout's do not add up.
    """
    count = layout.pp * layout.virtual_stages
    sizes = layout.stage_layers
    if sizes is not None:
        if len(sizes) != count or sum(sizes) != num_layers:
            raise LayoutError(
                f"stage_layers has {len(sizes)} stages of {sum(sizes)} layers together, and the "
                f"layout pp x virtual_stages = {count} of {num_layers} layers"
            )
    elif num_layers % count and (num_layers + 2) % count == 0 and count > 1:
        each = (num_layers + 2) // count
        sizes = (each - 1, *(each,) * (count - 2), each - 1)
    elif num_layers < count:
        raise LayoutError(
            f"{num_layers} layers are fewer than pp x virtual_stages = {layout.pp} x "
            f"{layout.virtual_stages} stages"
        )
    else:
        each, more = divmod(num_layers, count)
        sizes = tuple(each + (stage < more) for stage in range(count))
    starts = [sum(sizes[:stage]) for stage in range(count)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))
