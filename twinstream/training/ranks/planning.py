"""The plan of a run on several ranks: of all layouts that fit, the one predicted to be fastest."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from twinstream.clusters.executable import Stages, executable
from twinstream.clusters.layout import Layout, LayoutError
from twinstream.data.training_data import TrainingData
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.planner.request import PlanRequest, TrainingStep, caps_of
from twinstream.planner.search.chunking import chunkings
from twinstream.planner.search.tokens import proposed_tokens
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
from twinstream.schedule.cluster.cluster_timeline import ClusterTimeline
from twinstream.schedule.document import Caps
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.workload import Workload
from twinstream.simulator.cluster.simulate import simulate_cluster
from twinstream.training.expected import expected_packing
from twinstream.training.machine import Here
from twinstream.training.options import OptionsError, TrainOptions
from twinstream.training.planning import FEW_STEPS, StepPlan
from twinstream.training.ranks.shared_machine import cluster_here, cores_here, rank_machine

_ROUNDS_OF_A_RANK = 2  # so many microbatches for each rank, or the bubble is most of the step


@dataclass(frozen=True)
class Candidate:
    """A layout that was looked at: its tokens/s, or why it is none."""

    layout: Layout
    tokens_per_s: float | None
    why_not: str = ""

    def __str__(self) -> str:
        layout = self.layout
        virtual = f" x {layout.virtual_stages} virtual" if layout.virtual_stages > 1 else ""
        name = f"pp {layout.pp}{virtual} x dp {layout.dp}"
        name += f" ({layout.pipeline})" if layout.pp > 1 else ""
        if self.tokens_per_s is None:
            return f"{name}: {self.why_not}"
        return f"{name}: {self.tokens_per_s:,.0f} tokens/s"


@dataclass(frozen=True)
class RanksPlan(StepPlan):
    """The schedule of all ranks, what is predicted of it, and what else there was to choose."""

    schedule: ClusterSchedule
    predicted: ClusterTimeline
    layout: Layout
    total: Workload
    candidates: tuple[Candidate, ...]

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
    def state_bytes(self) -> int:
        """Of parameters and optimizer state over all stages, those of replicas once."""
        sizes = {
            tensor.tensor_id: tensor.size_bytes
            for part in self.schedule.schedules.values()
            for tensor in part.tensors
            if tensor.parent is None and tensor.role in ("parameter", "optimizer_state")
        }
        return sum(sizes.values())

    @property
    def chunks_of_a_replica(self) -> int:
        return self.chunks_per_step // self.layout.dp


def workload_of(
    options: TrainOptions, here: Here, spec: ModelSpec, recipe: Recipe, data: TrainingData
) -> Workload:
    """A step whose rounds are enough for a pipeline of all ranks.

    A round is a microbatch of one chunk, unless `chunks_per_round` says otherwise. Chunks are as
    large as leave two rounds for each rank, or as small as they get.

    Raises:
        ChunkingError: the numbers given contradict each other.
    """
    assert options.ranks is not None
    longest = options.seq_len
    step = TrainingStep(
        longest, options.tokens_per_step, options.chunk_tokens, options.chunks_per_round or 1,
        recipe=recipe, packing=expected_packing(data.lengths(), longest),
    )  # fmt: skip
    if step.tokens_per_step is None:
        request = PlanRequest.of(spec, here.machine, step=step)
        tokens = proposed_tokens(request)
        wanted = (options.epochs or 1.0) * data.epoch_tokens
        if options.steps is None and wanted < FEW_STEPS * tokens:  # few data: smaller steps
            tokens = max(1, int(wanted / FEW_STEPS / longest)) * longest
        least = _ROUNDS_OF_A_RANK * options.ranks * longest
        step = replace(step, tokens_per_step=-(-tokens // least) * least)
    found = chunkings(spec, step)
    enough = [w for w in found if w.rounds_per_step >= _ROUNDS_OF_A_RANK * options.ranks]
    return enough[0] if enough else max(found, key=lambda workload: workload.rounds_per_step)


def planned_for_ranks(
    options: TrainOptions, here: Here, spec: ModelSpec, recipe: Recipe, workload: Workload
) -> RanksPlan:
    """The layout predicted to be fastest of those that are possible and fit.

    Raises:
        LayoutError: there is none; says why of each.
    """
    assert options.ranks is not None
    machine = rank_machine(here.machine, options.ranks, cores_here())
    cluster = cluster_here(here.machine, options.ranks)
    caps, best = _caps(options, here), None
    seen: list[Candidate] = []
    for layout in _layouts(options):
        why = _why_not(layout, spec, workload)
        try:
            if why:
                raise LayoutError(why)
            stages = Stages(spec, _of_replica(workload, layout.dp), recipe, layout)
            schedule = executable(stages, machine, caps)
        except TwinstreamError as error:
            seen.append(Candidate(layout, None, str(error)))
            continue
        predicted = simulate_cluster(schedule, cluster, machine)
        tokens_per_s = workload.tokens_per_step / predicted.step_ns * 1e9
        seen.append(Candidate(layout, tokens_per_s))
        if best is None or predicted.step_ns < best[1].step_ns:
            best = schedule, predicted, layout
    if best is None:
        told = "; ".join(map(str, seen))
        raise LayoutError(f"no layout of {options.ranks} ranks can train this: {told}")
    return RanksPlan(*best, total=workload, candidates=tuple(seen))


def _layouts(options: TrainOptions) -> Iterator[Layout]:
    """Pipelines first, since they are those of one device's bits.

    Raises:
        OptionsError: what is given is no layout of so many ranks.
    """
    ranks, pp, dp = options.ranks or 1, options.pp, options.dp
    if ranks % (pp or 1) or ranks % (dp or 1) or (pp and dp and pp * dp != ranks):
        given = f"pp {pp or 'open'} x dp {dp or 'open'}"
        raise OptionsError(f"{given} are not the {ranks} ranks that are asked for")
    virtual = options.virtual_stages or 1
    if virtual > 1 and options.pipeline not in ("interleaved", "ring"):
        raise OptionsError(
            f"virtual_stages {virtual} needs --pipeline interleaved or ring, not "
            f"{options.pipeline or '1f1b, the default'}"
        )
    for stages in range(ranks, 0, -1):
        if ranks % stages or stages != (pp or stages) or ranks // stages != (dp or ranks // stages):
            continue
        several = stages > 1
        yield Layout(
            pp=stages, dp=ranks // stages, zero=0, virtual_stages=virtual if several else 1,
            pipeline=(options.pipeline if several else None) or "1f1b",
        )  # fmt: skip


def _why_not(layout: Layout, spec: ModelSpec, workload: Workload) -> str:
    rounds = workload.rounds_per_step
    if rounds % layout.dp:
        return f"{rounds} rounds of a step do not divide among {layout.dp} replicas"
    if layout.pp * layout.virtual_stages > spec.num_layers:
        return f"{spec.num_layers} layers are fewer than the stages"
    if layout.pipeline == "interleaved" and rounds // layout.dp % layout.pp:
        return f"{rounds // layout.dp} microbatches are not a multiple of pp, as interleaving needs"
    return ""


def _of_replica(workload: Workload, replicas: int) -> Workload:
    return workload.model_copy(update={"rounds_per_step": workload.rounds_per_step // replicas})


def _caps(options: TrainOptions, here: Here) -> Caps:
    """Of a rank: those given, or its share of what is free."""
    assert options.ranks is not None

    def own(given: str | None, found: str | int | None) -> str | int | None:
        if given is not None or not isinstance(found, int):
            return given
        return found // options.ranks if options.ranks else found

    device = own(options.device_mem, here.device_mem)
    return caps_of(here.machine, device, own(options.host_mem, here.host_mem))
