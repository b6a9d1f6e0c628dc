"""The plan of a run on several ranks: of all layouts that fit, the one predicted to be fastest."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinstream.clusters.pipeline import cluster_evaluation_of
from twinstream.clusters.running.measured import measured_cluster_timeline
from twinstream.clusters.running.places import place_of_ranks_here
from twinstream.clusters.search.cuts import cuts_of_ranks, jobs_of_ranks
from twinstream.clusters.search.found import Candidate
from twinstream.clusters.search.search import search_layouts
from twinstream.clusters.search.space import RunsHere
from twinstream.clusters.shared_machine import Place
from twinstream.executor.launch.protocol import Ranks, TrainTask
from twinstream.executor.program.options import BackendName, RunOptions
from twinstream.hardware_profiles.clusters.loader import save_with_node
from twinstream.log.layout_choice import LayoutChoice
from twinstream.log.run_files import RunFiles
from twinstream.measures.metrics import Summary, summarize
from twinstream.measures.residence import written_names
from twinstream.measures.wear import wear_notes
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layout import PART
from twinstream.models.layouts.layout import Layout, LayoutError
from twinstream.models.lowering.parts.expert_tasks import CAME
from twinstream.models.lowering.sharding import shares_experts
from twinstream.models.recipes.recipe import OptimizerPlace, Recipe
from twinstream.planner.request import TrainingStep, caps_of, require_use_of_disk
from twinstream.schedule.analysis.comparison import compare
from twinstream.schedule.cluster.projecting import RankPart, rank_part
from twinstream.schedule.cluster.verify import require_safe
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.files import write_document
from twinstream.schedule.sizes import gib
from twinstream.schedule.timeline import Timeline
from twinstream.schedule.workload import Workload
from twinstream.simulator.replay import simulate
from twinstream.training.machine import LocalMachine, Tell
from twinstream.training.options import OptionsError, TrainOptions
from twinstream.training.planning import (
    FEW_STEPS,
    START_S,
    DevicePlan,
    Documents,
    StepPlan,
    expected_packing,
    packed_length,
)

if TYPE_CHECKING:
    from twinstream.executor.ranks.rank_run import RankOutcome
    from twinstream.executor.state.parted_state import RankStates

_WITHOUT = "only one device does that yet: leave it out, or train without --ranks"
_PIECES = (2, 4, 8, 16)  # of a sequence, where none fits whole


@dataclass(frozen=True)
class RanksPlan(StepPlan):
    """The schedule of all ranks, what is predicted of it, and what else there was to choose.

    It is predicted at `place`, whose machine is one rank's.
    """

    schedule: Schedule
    predicted: Timeline
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
    def sharing_replicas(self) -> int:
        return self.layout.ep

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
    def forward_s(self) -> float:
        place = self.place
        found = simulate(self.evaluation(), place.machine, place.cluster)
        return found.step_ns / 1e9

    @property
    def checkpoint_bytes(self) -> int:
        """Of what is written of all stages and parts, replicas' once; shards padded as they are."""
        zero, tp, ep = self.layout.zero, self.layout.tp, self.layout.ep
        dp = self.layout.dp * self.layout.cp
        times = {"parameter": dp if zero == 3 else 1, "optimizer_state": dp if zero else 1}
        sizes: dict[str, int] = {}
        for part in self.schedule.schedules.values():
            tensors = {tensor.tensor_id: tensor for tensor in part.tensors}
            for item in part.carried:
                whole = tensors[tensors[item.tensor].parent or item.tensor]
                if whole.role in times:
                    ranks = tp if PART in whole.tensor_id else 1
                    shared = shares_experts(self.layout, whole.tensor_id)
                    ranks *= ep if shared else times[whole.role]
                    sizes[whole.tensor_id] = whole.size_bytes * ranks
        return sum(sizes[name] for name in written_names(list(sizes)))

    @property
    def parts(self) -> list[RankPart]:
        return [rank_part(self.schedule, rank) for rank in range(self.num_ranks)]

    @property
    def states(self) -> "RankStates | None":
        from twinstream.executor.state.parted_state import RankStates

        spec = ModelSpec.model_validate(self.schedule.model)
        return RankStates.of(spec, self.recipe, self.layout)

    def evaluation(self) -> Schedule:
        return cluster_evaluation_of(self.schedule)

    def started(self, task: TrainTask, backend: BackendName, tell: Tell, timeout_s: float) -> Ranks:
        from twinstream.executor.launch.hosts import meet_ranks
        from twinstream.executor.launch.rank_processes import RankProcesses
        from twinstream.executor.ranks.torchrun import StartedRank
        from twinstream.executor.ranks.world import Patience

        require_safe(self.schedule)
        # of the last three passes the last is never begun: two are timed, for a whole step
        options = RunOptions(backend, task.num_passes, timed_passes=3)
        patience = Patience(timeout_s, START_S)
        me = StartedRank.here()
        if me is None:
            processes = RankProcesses(
                self.num_ranks, patience, start_method="forkserver", tell=tell
            )
        else:  # ranks of all machines come to this one
            others = meet_ranks(me, patience)
            processes = RankProcesses(
                1, patience, start_method="forkserver", others=others, tell=tell
            )
        try:
            processes.begin(self.schedule, task, options)
        except BaseException:
            processes.close()
            raise
        return processes

    def measured(self, outcomes: "list[RankOutcome]", num_steps: int) -> Timeline:
        return measured_cluster_timeline(self.schedule, outcomes, num_steps)

    def summary(self, timeline: Timeline | None = None) -> Summary:
        return summarize(self.schedule, timeline or self.predicted, self.place.machine)

    def write(self, files: RunFiles) -> None:
        files.forget_one_device()
        write_document(self.schedule, files.cluster)
        save_with_node(self.place.cluster, self.place.machine, files.profile)
        write_document(self.choice, files.layouts)

    def write_comparison(self, files: RunFiles, measured: Timeline) -> None:
        write_document(measured, files.measured)
        comparison = compare(self.schedule, self.predicted, measured)
        write_document(comparison, files.comparison)

    @property
    def notes(self) -> list[str]:
        layout, wear = self.layout, wear_notes(self.schedule, self.place.machine, self.step_s)
        found = [f"note: {line}" for line in wear]
        if layout.dp > 1:
            found.append(
                f"note: gradients are summed over {layout.dp} replicas in their order: the data "
                "is that of one device, and the bits are those of this dp"
            )
        if layout.splits_sequences:
            found.append(
                f"note: sequences are computed in {layout.num_slices // 2} parts, a document in "
                "each: the bits are those of as many parts"
            )
        if layout.tp > 1 or layout.parts is not None:
            how = "by the transport" if layout.parts is None else "in their order"
            found.append(
                f"note: blocks are computed in {layout.num_parts} parts and summed {how}: the bits "
                "are those of as many parts"
            )
        if layout.token_slices > 1:
            found.append(
                "note: gradients of norms are summed over as many slices of a chunk's tokens"
            )
        if layout.ep > 1:
            found.append(
                f"note: {layout.ep} replicas share experts; each has room for all rows that all of "
                f"them may send of a chunk, {gib(self._room_of_rows)}, and none is dropped"
            )
        return found

    @property
    def _room_of_rows(self) -> int:
        """Of what may come of one chunk to a rank's experts in backward, which is more."""
        tensors = self.schedule.schedules["stage 0"].tensors
        came = {t.tensor_id: t.size_bytes for t in tensors if t.tensor_id.startswith(CAME)}
        first = min(came, default="").rpartition(".")[2]
        return sum(size for name, size in came.items() if name.endswith(f".{first}"))


Plan = DevicePlan | RanksPlan
"""What trains some of a run's steps: one device, or several ranks."""


def plan_ranks(
    options: TrainOptions, here: LocalMachine, spec: ModelSpec, recipe: Recipe, data: Documents,
    was: Workload | None,
) -> RanksPlan:  # fmt: skip
    """The plan of all ranks, with sequences in slices where they do not fit whole.

    Args:
        was: the chunks and rounds of a run that goes on, which stay.

    Raises:
        LayoutError: no layout can train this; says why of each.
    """
    workloads = [was] if was is not None else workloads_of(options, here, spec, recipe, data)
    # where updates are made does not change their bits; ranks make them after the backward pass
    place: OptimizerPlace = "device_after_backward" if recipe.clips else "device"
    recipe = recipe.model_copy(update={"optimizer": place, "host_groups": ()})
    try:
        return planned_for_ranks(options, here, spec, recipe, workloads)
    except LayoutError:
        fixed = was is not None or options.chunk_tokens is not None or recipe.loss.sides > 1
        for sliced in () if fixed else slices_of(workloads[0]):
            with suppress(LayoutError):
                return planned_for_ranks(options, here, spec, recipe, [sliced])
        raise


def workloads_of(
    options: TrainOptions, here: LocalMachine, spec: ModelSpec, recipe: Recipe, data: Documents
) -> list[Workload]:
    """Ways to cut a step; the first has rounds enough for a pipeline of all ranks.

    See `cuts_of_ranks`, which `plan --ranks` asks too.

    Raises:
        ChunkingError: the numbers given contradict each other.
    """
    ranks = options.ranks or 1
    longest, chunk = packed_length(options), options.chunk_tokens
    sliced = (chunk is not None and chunk < longest) or options.splits_sequences
    sliced = sliced and recipe.loss.sides == 1
    step = TrainingStep(
        longest, options.tokens_per_step, chunk, options.chunks_per_round, recipe=recipe,
        packing=None if sliced else expected_packing(data.lengths(), longest),
    )  # fmt: skip
    most_tokens = None
    if options.steps is None:  # few data: smaller steps
        most_tokens = int((options.epochs or 1.0) * data.epoch_tokens / FEW_STEPS)
    return cuts_of_ranks(spec, step, here.machine, ranks, most_tokens)


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
    options: TrainOptions, here: LocalMachine, spec: ModelSpec, recipe: Recipe,
    workloads: Sequence[Workload],
) -> RanksPlan:  # fmt: skip
    """The layout predicted to be fastest of those that are possible and fit.

    Where replicas do not fit whole, and it is not said what they shard, they shard what is needed.

    Raises:
        LayoutError: there is none; says why of each.
        ChoiceError: there is a disk, and no use for it.
    """
    if (caps := _caps(options, here)).disk_bytes is not None:
        require_use_of_disk(spec, recipe, here.machine)
    place = place_of_ranks_here(here.machine, options.ranks_on_host, here.nvlink, options.hosts)
    job, *others = jobs_of_ranks(spec, recipe, workloads)
    searched = search_layouts(
        job, options.ranks or 1, place.cluster, options.layout_fields(),
        caps=caps, here=RunsHere(place.machine, others),
    )  # fmt: skip
    best = searched.best[0]
    assert best.schedule is not None and best.timeline is not None, "it is planned"
    return RanksPlan(
        best.schedule, best.timeline, best.layout, best.job.step, searched.candidates, place
    )


def _caps(options: TrainOptions, here: LocalMachine) -> Caps:
    """Of a rank: those given, or its share of what is free; a GPU is its own."""

    def own(given: str | int | None, found: str | int | None) -> str | int | None:
        if given is not None or not isinstance(found, int):
            return given
        return found // options.ranks_on_host

    device = here.device_mem
    if here.machine.device == "cpu":
        device = own(options.device_mem, device)
    host, disk = own(options.host_mem, here.host_mem), own(options.disk_mem, here.disk_mem)
    return caps_of(here.machine, device, host, options.ranks_on_host, disk_mem=disk)


def what_is_of_one_device(options: TrainOptions) -> str | None:
    """What is asked for that several ranks do not do yet; None where they do all."""
    asked = {
        f"policy '{options.policy}'": options.policy != "optimal",
        f"updates on the host (--optimizer {options.optimizer})": options.update_places != "recipe",
        "recompute (one level for all blocks)": options.recompute is not None,
    }
    return next((what for what, is_asked in asked.items() if is_asked), None)


def require_possible(options: TrainOptions) -> None:
    """
    Raises:
        OptionsError: an option is of what ranks do not do yet, or of ranks, and there is one.
    """
    if options.on_ranks:
        if (what := what_is_of_one_device(options)) is not None:
            raise OptionsError(f"{what}: {_WITHOUT}")
        return
    alone = {
        **dict.fromkeys(("pp", "dp", "tp", "cp", "ep", "virtual_stages"), 1), "zero": 0,
        "pipeline": None,
    }  # fmt: skip
    given = [name for name, one in alone.items() if getattr(options, name) not in (None, one)]
    if given:
        raise OptionsError(f"{', '.join(given)}: of several ranks; say how many: ranks = N")


def on_all_gpus(options: TrainOptions, tell: Callable[[str], None]) -> TrainOptions:
    """With a rank for each GPU of this machine, unless it is said how many.

    Not yet run on a GPU (see docs/benchmarks/README.md).
    """
    if options.ranks is not None or options.backend == "cpu":
        return options
    from twinstream.executor.ranks.gpus import num_gpus

    found = num_gpus()
    if found < 2:
        return options
    if (what := what_is_of_one_device(options)) is not None:
        tell(f"training on one of {found} GPUs: several do not do {what} yet")
        return options
    tell(f"training on all {found} GPUs of this machine; --ranks 1 takes one of them")
    return options.model_copy(update={"ranks": found})
