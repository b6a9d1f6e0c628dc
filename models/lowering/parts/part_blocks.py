"""A stage's blocks as parts with collectives between them, for layouts that split a block.

Each part is a task with operands and saved tensors of its own, as a whole block is. Kernel sets
that are priced and not run here (Megatron's) have their tasks from here, too.
"""

from collections.abc import Sequence
from dataclasses import replace

from twinstream.models.layout import EXPERTS
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import stages_of
from twinstream.models.layouts.saved import head_peak_bytes, stored_hidden_bytes
from twinstream.models.lowering.chain_builder import CollectiveCall
from twinstream.models.lowering.parts.builder import Buffer, StageBuilder, Use
from twinstream.models.lowering.parts.groups import (
    Group,
    embedding_group,
    groups_of_layer,
    head_group,
    mesh_of,
)
from twinstream.models.lowering.parts.layer_parts import whole
from twinstream.models.lowering.parts.layers import LayerOps, kind_name
from twinstream.models.lowering.parts.weights import StageWeights
from twinstream.models.lowering.stage import run_stage
from twinstream.models.lowering.stage_cut import StageCut, stage_cut
from twinstream.models.providers.flops import model_flops_per_sequence
from twinstream.schedule.chain import Chain
from twinstream.schedule.cost import Work
from twinstream.schedule.workload import ModelRef

Message = tuple[str, Use]


def lower_in_parts(job: Job, stage: int, *, folded: bool = False) -> Chain:
    """Return what the ranks of a stage do in a step."""
    cut = stage_cut(job.layout, job.shape, job.workload, stage)
    blocks = PartBlocks(job, cut, folded=folded)
    run_stage(cut, blocks)
    built = blocks.builder
    return Chain.model_construct(
        tensors=tuple(built.tensors), calls=built.calls, tasks=tuple(built.tasks), recomputes=(),
        inputs=(), outputs=(), persistent=tuple(built.persistent), round_starts=(0,),
        workload=job.workload,
        model=ModelRef(name=job.shape.name, content_hash="", spec={}),
        recipe=job.recipe.model_dump(mode="json"),
        model_flops=job.global_batch
        * model_flops_per_sequence(job.shape, job.seq_len, job.recipe),
        pools=built.pools,
    )  # fmt: skip


class PartBlocks:
    """Adds the tasks of a stage's layers, embedding and head.

    Hidden states and their gradients go from stage to stage as `boundary.G.J` and `d_boundary.G.J`
    (into virtual stage G, of microbatch J).
    """

    def __init__(self, job: Job, cut: StageCut, *, folded: bool = False) -> None:
        self.job, self.cut = job, cut
        self.builder = self.b = StageBuilder()
        everyone = tuple(axis.name for axis in mesh_of(job, 1).axes if axis.size > 1)
        shared = ("embedding" if cut.first else "head",) if cut.shares_embedding else ()
        self.groups = StageWeights(self.b, job, self._groups(), shared, everyone)
        self.layers = LayerOps(self.b, job, self.groups, folded=folded)
        self.hidden = stored_hidden_bytes(job.work)
        self._inputs: dict[tuple[int, int], Buffer] = {}
        self._tops: dict[int, Buffer] = {}

    def _groups(self) -> dict[str, Group]:
        found: dict[str, Group] = {}
        job, usual = self.job, {one.name: one for one in groups_of_layer(self.job)}
        owned: dict[int, tuple[Group, ...]] = {}
        if self.cut.first:
            found["embedding"] = embedding_group(self.job)
        for span in self.cut.spans:
            for layer in span:
                kind = job.shape.kind_of(layer)
                if kind not in owned:
                    owned[kind] = groups_of_layer(job.of_kind(kind))
                for own, suffix in zip(owned[kind], ("", EXPERTS), strict=False):
                    is_usual = own.num_parameters == usual[own.name].num_parameters
                    name = own.name if is_usual else own.name + kind_name(kind)  # own sizes
                    found[f"{layer}{suffix}"] = replace(own, layer=layer, name=name)
        if self.cut.last:
            found["head"] = head_group(self.job)
        return found

    def begin(self, chunk: int, j: int) -> None:
        """Nothing is fed to what does not run here."""

    def hidden_in(self, chunk: int, j: int) -> list[Message]:
        """Return what the stage before sends, in the version that its last task makes."""
        place = self.cut.places[chunk]
        held = self._enter(chunk, j, spare=1)
        held.version = self.layers.versions_made(self._span(place - 1), "forward") - 1
        return [(held.tensor, ("hidden", held, "write"))]

    def forward(self, chunk: int, j: int) -> None:
        """Go through a virtual stage's layers; what goes to the next stage is in few slots."""
        tensor = f"boundary.{self.cut.places[chunk] + 1}.{j}"
        if self._is_top(chunk):
            self._out = self._tops[j] = self._take("boundary", tensor)
        else:
            self._out = self._take("sending", tensor, spare=1)
        fine = self.layers.alone or (j == 0 and self.job.layout.dp_overlap)
        entered = self._inputs[chunk, j]
        self.layers.forward(self.cut.spans[chunk], chunk, j, entered, self._out, fine=fine)

    def hidden_out(self, chunk: int, j: int) -> list[Message]:
        """Return what the next stage is sent."""
        return [(self._out.tensor, ("hidden", self._out, "read"))]

    def gradient_in(self, chunk: int, j: int) -> list[Message]:
        """Return the gradient that the next stage sends."""
        place = self.cut.places[chunk] + 1
        held = self._gradient = self._take("receiving", f"d_boundary.{place}.{j}", self._early)
        held.version = self.layers.versions_made(self._span(place), "backward") - 1
        return [(held.tensor, ("hidden", held, "write"))]

    def backward(self, chunk: int, j: int) -> None:
        """Go back through a virtual stage's layers."""
        self._out = self._take("sending_back", f"d_boundary.{self.cut.places[chunk]}.{j}", spare=1)
        last, fine = self._last_and_fine(chunk, j)
        ends = self._inputs[chunk, j], self._gradient, self._out
        self.layers.backward(self.cut.spans[chunk], chunk, j, ends, fine=fine, last=last)
        if self._is_top(chunk):
            self.b.free(self._gradient)

    gradient_out = hidden_out

    def other_phase(self, phase: str, chunk: int, j: int) -> None:
        """Make the gradients of weights that backward has put off."""
        assert phase == "weight", "what is priced only is not evaluated"
        last, fine = self._last_and_fine(chunk, j)
        entered = self._inputs[chunk, j]
        self.layers.weight(self.cut.spans[chunk], chunk, j, entered, fine=fine, last=last)

    def embed_forward(self, chunk: int, j: int) -> None:
        """Make the first layer's input of shards of the vocabulary."""
        held = self._enter(chunk, j)
        self.groups.gather(["embedding"], f"forward.{j}")
        made = self._whole() if self._is_split else held
        uses: list[Use] = [self.groups.read("embedding"), ("output", made, "write")]
        self._compute("embed_forward", j, self.job.work.embedding().forward, uses)
        self._sum_over_tp("embed", j, made, held)
        self.groups.drop(["embedding"])

    def embed_backward(self, chunk: int, j: int) -> None:
        """Make the embedding's gradients, of the hidden state of all tokens."""
        source = self._all_tokens("embed", j, self._out)
        uses: list[Use] = [("d_hidden", source, "read"), self.groups.gradient("embedding")]
        self._compute("embed_backward", j, self.job.work.embedding().backward, uses)
        if self._is_split:
            self.b.free(source)
        last = self.cut.completes(chunk, j)
        self.groups.after_backward("embedding", f"backward.{j}", last=last)

    def head(self, chunk: int, j: int) -> None:
        """Make the loss and its gradients over shards of the vocabulary."""
        job, b, weights, work = self.job, self.b, self.groups, self.job.work.head()
        weights.gather(["head"], f"{j}")
        names = ["head"]
        if job.shape.tied_embeddings and job.layout.pp == 1:
            weights.gather(["embedding"], f"head.{j}")
            names.append("embedding")
        hidden = self._all_tokens("head", j, self._tops.pop(j))
        logits = b.allocate("logits", head_peak_bytes(job.work), "scratch", "float32")
        reads: list[Use] = [("hidden", hidden, "read"), *map(weights.read, names)]
        gradients = [*map(weights.gradient, names)]
        self._compute("head_forward", j, work.forward, [*reads, ("logits", logits, "write")])
        if job.layout.tp > 1:
            sums = b.allocate("loss_sums", 12 * job.work.tokens, "scratch", "float32")
            uses: list[Use] = [("logits", logits, "read"), ("sums", sums, "write")]
            b.compute(f"loss_sums.{j}", "loss", (), uses, b.label("loss", round_=j))
            self._communicate(f"loss_reduce.{j}", "all_reduce", [("sums", sums, "update")])
            reads.append(("sums", sums, "read"))
            b.free(sums)
        out = b.allocate("head_gradient", self.hidden, "activation", job.dtype, spare=1)
        made = self._whole() if self._is_split else out
        uses = [*reads, ("logits", logits, "update"), ("d_hidden", made, "write"), *gradients]
        self._compute("head_backward", j, work.backward, uses)
        self._sum_over_tp("head", j, made, out)
        if self._is_split:
            b.free(hidden)
        b.free(logits)
        weights.drop(names)
        weights.after_backward("head", f"{j}", last=self.cut.completes(chunk, j))
        self._gradient = out

    @property
    def _is_split(self) -> bool:
        """Whether each rank of tp has some tokens' hidden state only."""
        return self.job.layout.tp > 1 and self.job.layout.sequence_parallel

    def _whole(self) -> Buffer:
        return self.b.allocate("whole", whole(self.job), "activation", self.job.dtype)

    def _all_tokens(self, name: str, j: int, part: Buffer) -> Buffer:
        """Return the hidden state of all tokens, gathered over tp where it is split."""
        if not self._is_split:
            return part
        held = self._whole()
        uses: list[Use] = [("part", part, "read"), ("hidden", held, "write")]
        self._communicate(f"{name}_gather.{j}", "all_gather", uses)
        return held

    def _sum_over_tp(self, name: str, j: int, made: Buffer, out: Buffer) -> None:
        """Sum what each rank of tp has made of all tokens; where they are split, its share."""
        if self._is_split:
            uses: list[Use] = [("hidden", made, "read"), ("part", out, "write")]
            self._communicate(f"{name}_scatter.{j}", "reduce_scatter", uses)
            self.b.free(made)
        elif self.job.layout.tp > 1:
            self._communicate(f"{name}_reduce.{j}", "all_reduce", [("hidden", out, "update")])

    def _enter(self, chunk: int, j: int, spare: int = 0) -> Buffer:
        held = self._take("boundary", f"boundary.{self.cut.places[chunk]}.{j}", spare)
        self._inputs[chunk, j] = held
        return held

    def _is_top(self, chunk: int) -> bool:
        return self.cut.places[chunk] == self.cut.num_places - 1

    def _span(self, place: int) -> range:
        return stages_of(self.job.layout, self.job.shape.num_layers)[place]

    def _last_and_fine(self, chunk: int, j: int) -> tuple[bool, bool]:
        """Whether gradients are complete then, and whether each layer has tasks of its own."""
        last = self.cut.completes(chunk, j)
        return last, self.layers.alone or (last and self.job.layout.dp_overlap)

    @property
    def _early(self) -> int:
        """How many gradients come before they can be used, beside the one in use: breadth first,
        those of the first stage's next chunk come while this one still runs the chunk before."""
        layout = self.job.layout
        if layout.pipeline == "ring" and self.cut.places[0] == layout.pp - 1:
            return max(1, self.job.num_microbatches - layout.pp + 1)
        return 1

    def _take(self, pool: str, tensor: str, spare: int = 0) -> Buffer:
        return self.b.exchanged(pool, self.hidden, "activation", self.job.dtype, tensor, spare)

    def _compute(self, kind: str, j: int, works: tuple[Work, ...], uses: Sequence[Use]) -> None:
        self.b.compute(f"{kind}.{j}", kind, works, uses, self.b.label(kind, round_=j))

    def _communicate(self, op_id: str, collective: str, uses: Sequence[Use]) -> None:
        said = CollectiveCall(collective, ("tp",), "tp")
        self.b.communicate(op_id, said, uses, self.b.label("tp"))
