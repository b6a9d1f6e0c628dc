"""The plan of a run on several ranks: of all layouts that fit, the one predicted to be fastest."""

from collections.abc import Iterator
from dataclasses import dataclass

from twinstream.clusters.choosing import Candidate, RanksQuestion, workload_of_ranks
from twinstream.clusters.layout import Layout
from twinstream.clusters.shared_machine import Place, cores_here, place_here
from twinstream.data.training_data import TrainingData
from twinstream.log.layout_choice import LayoutChoice
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.planner.request import TrainingStep, caps_of
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
from twinstream.schedule.cluster.cluster_timeline import ClusterTimeline
from twinstream.schedule.document import Caps
from twinstream.schedule.workload import Workload
from twinstream.training.checkpoints import written_names
from twinstream.training.expected import expected_packing
from twinstream.training.machine import Here
from twinstream.training.options import TrainOptions
from twinstream.training.planning import FEW_STEPS, StepPlan

_PIECES = (2, 4, 8, 16)  # of a sequence, where none fits whole


@dataclass(frozen=True)
class RanksPlan(StepPlan):
    """The schedule of all ranks, what is predicted of it, and what else there was to choose.

    It is predicted at `place`, whose machine is one rank's.
    """

    schedule: ClusterSchedule
    predicted: ClusterTimeline
    layout: Layout
    total: Workload
    candidates: tuple[Candidate, ...]
    place: Place

    @property
    def choice(self) -> LayoutChoice:
        """The layout, the others that were looked at, and what is assumed of this machine."""
        chosen = next(one for one in self.candidates if one.layout == self.layout)
        return LayoutChoice(
            chosen=str(chosen),
            others=tuple(str(one) for one in self.candidates if one is not chosen),
            assumed=self.place.assumed,
        )

    @property
    def workload(self) -> Workload:
        return self.total

    @property
    def step_s(self) -> float:
        return self.predicted.step_ns / 1e9

    @property
    def tokens_per_s(self) -> float:
        """As predicted."""
        return self.tokens_per_step / self.step_s

    @property
    def checkpoint_bytes(self) -> int:
        """Of what is written of all stages, replicas' once; shards padded as they are."""
        zero, dp = self.layout.zero, self.layout.dp
        times = {"parameter": dp if zero == 3 else 1, "optimizer_state": dp if zero else 1}
        sizes: dict[str, int] = {}
        adapters = False
        for part in self.schedule.schedules.values():
            adapters = adapters or part.recipe.get("lora") is not None
            tensors = {tensor.tensor_id: tensor for tensor in part.tensors}
            for item in part.carried:
                whole = tensors[tensors[item.tensor].parent or item.tensor]
                if whole.role in times:
                    sizes[whole.tensor_id] = whole.size_bytes * times[whole.role]
        return sum(sizes[name] for name in written_names(list(sizes), adapters=adapters))

    @property
    def chunks_of_a_replica(self) -> int:
        return self.chunks_per_step // self.layout.dp


def workload_of(
    options: TrainOptions, here: Here, spec: ModelSpec, recipe: Recipe, data: TrainingData
) -> Workload:
    """A step whose rounds are enough for a pipeline of all ranks.

    See `workload_of_ranks`, which `plan --ranks` asks too.

    Raises:
        ChunkingError: the numbers given contradict each other.
    """
    assert options.ranks is not None
    longest, chunk = options.seq_len, options.chunk_tokens
    sliced = chunk is not None and chunk < longest
    step = TrainingStep(
        longest, options.tokens_per_step, chunk, options.chunks_per_round, recipe=recipe,
        packing=None if sliced else expected_packing(data.lengths(), longest),
    )  # fmt: skip
    most_tokens = None
    if options.steps is None:  # few data: smaller steps
        most_tokens = int((options.epochs or 1.0) * data.epoch_tokens / FEW_STEPS)
    return workload_of_ranks(spec, step, here.machine, options.ranks, most_tokens)


def slices_of(workload: Workload) -> Iterator[Workload]:
    """The same step with its sequences in more and more slices, each with a document of its own."""
    for pieces in _PIECES:
        chunk, left = divmod(workload.seq_len, pieces)
        if left:
            return
        step = workload.tokens_per_step // workload.seq_len  # of a sequence each
        yield Workload(
            seq_len=workload.seq_len, chunk_tokens=chunk, chunks_per_round=pieces,
            rounds_per_step=step,
        )  # fmt: skip


def planned_for_ranks(
    options: TrainOptions, here: Here, spec: ModelSpec, recipe: Recipe, workload: Workload
) -> RanksPlan:
    """The layout predicted to be fastest of those that are possible and fit.

    Where replicas do not fit whole, and it is not said what they shard, they shard what is needed.

    Raises:
        LayoutError: there is none; says why of each.
    """
    assert options.ranks is not None
    place = place_here(here.machine, options.ranks, cores_here(), here.nvlink)
    question = RanksQuestion(
        spec, recipe, workload, options.ranks, _fixed(options), place.cluster, place.machine,
        _caps(options, here),
    )  # fmt: skip
    found = question.answer()
    return RanksPlan(
        found.schedule, found.predicted, found.layout, workload, found.candidates, place
    )


def _fixed(options: TrainOptions) -> dict[str, object]:
    """What of the layout is not open."""
    names = ("pp", "dp", "zero", "virtual_stages", "pipeline", "reduction")
    return {name: getattr(options, name) for name in names}


def _caps(options: TrainOptions, here: Here) -> Caps:
    """Of a rank: those given, or its share of what is free; a GPU is its own."""
    assert options.ranks is not None

    def own(given: str | None, found: str | int | None) -> str | int | None:
        if given is not None or not isinstance(found, int):
            return given
        return found // options.ranks if options.ranks else found

    device = here.device_mem
    if here.backend == "cpu":
        device = own(options.device_mem, device)
    return caps_of(here.machine, device, own(options.host_mem, here.host_mem))
