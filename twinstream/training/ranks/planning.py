"""The plan of a run on several ranks: of all layouts that fit, the one predicted to be fastest."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from twinstream.clusters.evaluating import cluster_evaluation_of
from twinstream.clusters.executable import Stages, executable, sharding_of
from twinstream.clusters.layout import Layout, LayoutError
from twinstream.clusters.running.measured import measured_cluster_timeline
from twinstream.data.training_data import TrainingData
from twinstream.executor.launch.protocol import Ranks, TrainTask
from twinstream.executor.program.options import BackendName, RunOptions
from twinstream.hardware_profiles.clusters.loader import save_with_node
from twinstream.log.layout_choice import LayoutChoice
from twinstream.log.run_files import RunFiles
from twinstream.measures.cluster_comparison import compare_cluster
from twinstream.measures.cluster_summary import ClusterSummary, summarize_cluster
from twinstream.models.recipe import OptimizerPlace, Recipe
from twinstream.models.spec import ModelSpec
from twinstream.planner.request import PlanRequest, TrainingStep, caps_of
from twinstream.planner.search.chunking import chunkings
from twinstream.planner.search.tokens import proposed_tokens
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
from twinstream.schedule.cluster.cluster_timeline import ClusterTimeline
from twinstream.schedule.cluster.projecting import RankPart, rank_part
from twinstream.schedule.cluster.verify_cluster import require_safe_cluster
from twinstream.schedule.document import Caps
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import write_document
from twinstream.schedule.timeline import Timeline
from twinstream.schedule.workload import Workload
from twinstream.simulator.replay import simulate_cluster
from twinstream.training.checkpoints import written_names
from twinstream.training.machine import LocalMachine, Tell
from twinstream.training.options import OptionsError, TrainOptions
from twinstream.training.planning import (
    FEW_STEPS,
    START_S,
    AnyTimeline,
    DevicePlan,
    StepPlan,
    expected_packing,
)
from twinstream.training.ranks.shared_machine import Place, cores_here, place_here

if TYPE_CHECKING:
    from twinstream.executor.ranks.rank_run import RankOutcome
    from twinstream.executor.state.sharded_state import ShardedState

_TO_FIT = (1, 2, 3)  # of ZeRO, the less there is to say the earlier
_PIECES = (2, 4, 8, 16)  # of a sequence, where none fits whole
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
        name += f", ZeRO {layout.zero}" if layout.zero else ""
        name += f" ({layout.pipeline})" if layout.pp > 1 else ""
        if self.tokens_per_s is None:
            return f"{name}: {self.why_not}"
        return f"{name}: {self.tokens_per_s:,.0f} tokens/s"


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
    def num_ranks(self) -> int:
        return self.schedule.mesh.size

    @property
    def num_replicas(self) -> int:
        return self.layout.dp

    @property
    def workload(self) -> Workload:
        return self.total

    @property
    def recipe(self) -> Recipe:
        return Recipe.model_validate(self.schedule.schedules["stage 0"].recipe)

    @property
    def step_s(self) -> float:
        return self.predicted.step_ns / 1e9

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
    def parts(self) -> list[RankPart]:
        return [rank_part(self.schedule, rank) for rank in range(self.num_ranks)]

    @property
    def shards(self) -> "ShardedState | None":
        from twinstream.executor.state.sharded_state import ShardedState

        sharding = sharding_of(self.layout)
        spec = ModelSpec.model_validate(self.schedule.model)
        return None if sharding is None else ShardedState(spec, self.recipe, sharding)

    def evaluation(self) -> ClusterSchedule:
        return cluster_evaluation_of(self.schedule)

    def started(self, task: TrainTask, backend: BackendName, tell: Tell, timeout_s: float) -> Ranks:
        from twinstream.executor.launch.rank_processes import RankProcesses
        from twinstream.executor.ranks.world import Patience

        require_safe_cluster(self.schedule)
        # of the last three passes the last is never begun: two are timed, for a whole step
        options = RunOptions(backend, task.num_passes, timed_passes=3)
        patience = Patience(timeout_s, START_S)
        processes = RankProcesses(self.num_ranks, patience, start_method="forkserver")
        try:
            processes.begin(self.schedule, task, options)
        except BaseException:
            processes.close()
            raise
        return processes

    def measured(self, outcomes: "list[RankOutcome]", num_steps: int) -> ClusterTimeline:
        return measured_cluster_timeline(self.schedule, outcomes, num_steps)

    def summary(self, timeline: AnyTimeline | None = None) -> ClusterSummary:
        assert not isinstance(timeline, Timeline), "it is of all ranks"
        return summarize_cluster(self.schedule, timeline or self.predicted, self.place.machine)

    def write(self, files: RunFiles) -> None:
        files.forget_one_device()
        write_document(self.schedule, files.cluster)
        save_with_node(self.place.cluster, self.place.machine, files.profile)
        write_document(self.choice, files.layouts)

    def write_comparison(self, files: RunFiles, measured: AnyTimeline) -> None:
        assert isinstance(measured, ClusterTimeline), "it is of all ranks"
        write_document(measured, files.measured)
        comparison = compare_cluster(self.schedule, self.predicted, measured)
        write_document(comparison, files.comparison)

    @property
    def notes(self) -> list[str]:
        if self.layout.dp == 1:
            return []
        return [
            f"note: gradients are summed over {self.layout.dp} replicas in their order: the data "
            "is that of one device, and the bits are those of this dp"
        ]


Plan = DevicePlan | RanksPlan
"""What trains some of a run's steps: one device, or several ranks."""


def plan_ranks(
    options: TrainOptions, here: LocalMachine, spec: ModelSpec, recipe: Recipe, data: TrainingData,
    was: Workload | None,
) -> RanksPlan:  # fmt: skip
    """The plan of all ranks, with sequences in slices where they do not fit whole.

    Args:
        was: the chunks and rounds of a run that goes on, which stay.

    Raises:
        LayoutError: no layout can train this; says why of each.
    """
    workload = was or workload_of(options, here, spec, recipe, data)
    # where updates are made does not change their bits; ranks make them after the backward pass
    place: OptimizerPlace = "device_after_backward" if recipe.clips else "device"
    recipe = recipe.model_copy(update={"optimizer": place})
    try:
        return planned_for_ranks(options, here, spec, recipe, workload)
    except LayoutError:
        fixed = was is not None or options.chunk_tokens is not None
        for sliced in () if fixed else slices_of(workload):
            with suppress(LayoutError):
                return planned_for_ranks(options, here, spec, recipe, sliced)
        raise


def workload_of(
    options: TrainOptions, here: LocalMachine, spec: ModelSpec, recipe: Recipe, data: TrainingData
) -> Workload:
    """A step whose rounds are enough for a pipeline of all ranks.

    A round is a microbatch of one chunk, unless `chunks_per_round` says otherwise. Chunks are as
    large as leave two rounds for each rank, or as small as they get. With less than a sequence a
    chunk is a slice of one, as on one device, and a round has all of a sequence's.

    Raises:
        ChunkingError: the numbers given contradict each other.
    """
    assert options.ranks is not None
    longest, chunk = options.seq_len, options.chunk_tokens
    sliced = chunk is not None and chunk < longest
    together = longest // chunk if chunk is not None and sliced else 1
    step = TrainingStep(
        longest, options.tokens_per_step, chunk, options.chunks_per_round or together,
        recipe=recipe, packing=None if sliced else expected_packing(data.lengths(), longest),
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
    options: TrainOptions, here: LocalMachine, spec: ModelSpec, recipe: Recipe, workload: Workload
) -> RanksPlan:
    """The layout predicted to be fastest of those that are possible and fit.

    Where replicas do not fit whole, and it is not said what they shard, they shard what is needed.

    Raises:
        LayoutError: there is none; says why of each.
    """
    trial = _Trial(options, here, spec, recipe, workload)
    found: list[RanksPlan] = []
    seen: list[Candidate] = []
    for layout in _layouts(options):
        wanted = [layout]
        if options.zero is None and layout.dp > 1 and not _why_not(layout, spec, workload):
            wanted += [layout.model_copy(update={"zero": zero}) for zero in _TO_FIT]
        for each in wanted:
            plan = trial.plan(each)
            if isinstance(plan, RanksPlan):
                found.append(plan)
                seen.append(Candidate(each, plan.tokens_per_s))
                break
            seen.append(plan)
    if not found:
        told = "; ".join(map(str, seen))
        raise LayoutError(f"no layout of {options.ranks} ranks can train this: {told}")
    best = min(found, key=lambda plan: plan.step_s)
    return replace(best, candidates=tuple(seen))


@dataclass(frozen=True)
class _Trial:
    """Plans a layout and predicts it."""

    options: TrainOptions
    here: LocalMachine
    spec: ModelSpec
    recipe: Recipe
    workload: Workload

    def plan(self, layout: Layout) -> RanksPlan | Candidate:
        """Or why it is none."""
        here = self.here
        place = place_here(here.machine, layout.num_gpus, cores_here(), here.nvlink)
        try:
            if why := _why_not(layout, self.spec, self.workload):
                raise LayoutError(why)
            replica = _of_replica(self.workload, layout.dp)
            stages = Stages(self.spec, replica, self.recipe, layout)
            schedule = executable(stages, place.machine, _caps(self.options, self.here))
        except TwinstreamError as error:
            return Candidate(layout, None, str(error))
        predicted = simulate_cluster(schedule, place.cluster, place.machine)
        return RanksPlan(schedule, predicted, layout, self.workload, (), place)


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
        replicas, several = ranks // stages, stages > 1
        yield Layout(
            pp=stages, dp=replicas, zero=(options.zero or 0) if replicas > 1 else 0,
            reduction=options.reduction,
            virtual_stages=virtual if several else 1,
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


def _caps(options: TrainOptions, here: LocalMachine) -> Caps:
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
