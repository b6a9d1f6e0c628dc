"""The plan of a run's steps, and the recipe that decides its bits."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from twinstream.data.chunk_stream import ChunkStream
from twinstream.data.data_record import DataRecord
from twinstream.data.order import Position
from twinstream.data.packing import Chunk, ChunkShape
from twinstream.executor.launch.protocol import Ranks, TrainTask
from twinstream.executor.program.module_programs import ModulePrograms
from twinstream.executor.program.options import BackendName, RunOptions
from twinstream.hardware_profiles.schema import Machine
from twinstream.log.run_files import RunFiles
from twinstream.measures.metrics import Summary, summarize
from twinstream.measures.missing_attention import missing_attention_notes
from twinstream.measures.residence import checkpoint_bytes
from twinstream.measures.wear import wear_notes
from twinstream.models.loss import kind_of_loss
from twinstream.models.lowering.lower import require_packs
from twinstream.models.providers.model import AnyModel, require_decoder
from twinstream.models.recipes.adapter_layout import lora_there
from twinstream.models.recipes.lora import Lora, lora_of
from twinstream.models.recipes.recipe import KernelChoice, OptimizerPlace, Recipe
from twinstream.models.recipes.update_rules import OwnRule
from twinstream.planner.choices import Choices, recompute_level
from twinstream.planner.evaluate.evaluation import evaluation_of
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.kernel_choice import Packed, attention_for, kernels_for, usual_kernels
from twinstream.planner.planner import Planner
from twinstream.planner.request import PlanRequest, TrainingStep
from twinstream.schedule.analysis.comparison import compare
from twinstream.schedule.cluster.projecting import RankPart
from twinstream.schedule.document import Schedule
from twinstream.schedule.files import write_document
from twinstream.schedule.timeline import Timeline
from twinstream.schedule.workload import Packing, Result, Workload
from twinstream.simulator.replay import simulate, steady_state
from twinstream.training.machine import LocalMachine, Tell
from twinstream.training.options import OptionsError, TrainOptions

if TYPE_CHECKING:
    from twinstream.executor.ranks.rank_run import RankOutcome

FEW_STEPS = 20  # where tokens per step are open, so many steps at least
START_S = 600.0  # for ranks to be warm; who dies meanwhile is noticed at once
_MOST_EXPECTED = 1024
_ROOM, _MORE_ROOM = 4, 8  # a chunk has room for so many times what is expected, and some more


class Documents(Protocol):
    """Documents as far as a plan asks: how long they are."""

    @property
    def longest(self) -> int:
        """Tokens of the longest that is computed whole."""

    @property
    def sides(self) -> int:
        """Documents of a row: one, or the two of a pair."""

    @property
    def epoch_tokens(self) -> int:
        """Tokens of all of them."""

    def lengths(self) -> NDArray[np.int64]:
        """Return the tokens of each of a sample."""


class RunData(Documents, Protocol):
    """The data of a run, whose model takes token ids, or tensors of samples."""

    @property
    def unit(self) -> str:
        """What a step has so many of: documents, pairs, samples."""

    @property
    def text(self) -> str:
        """What there is, for a screen."""

    @property
    def fingerprint(self) -> str:
        """Of contents, and of how they become chunks."""

    @property
    def weights(self) -> tuple[float, ...]:
        """How many times an epoch goes through each source."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user should know, a line each."""

    @property
    def record(self) -> DataRecord:
        """From which a run that goes on knows its data again."""

    def gone_on_with(self, fingerprint: str, record: DataRecord | None) -> Self:
        """The data of a run that began with it; raises DataError if it is other data."""

    def require_unread(self, chunk_tokens: int, seed: int, start: Position) -> None:
        """Raise DataError if something that changed has been read before this position."""

    def empty_chunk(self, shape: ChunkShape) -> Chunk:
        """Return a chunk that only fills up a pass."""

    def chunks(
        self, *, chunk_tokens: int, most_documents: int, seed: int, start: Position, alone: bool
    ) -> ChunkStream:
        """Chunks without end, epoch after epoch, from a position on."""


class StepPlan(ABC):
    """What a plan says of its steps and their data, which replicas of the model share out."""

    @property
    @abstractmethod
    def workload(self) -> Workload:
        """A step, over all who compute it."""

    @property
    @abstractmethod
    def step_s(self) -> float:
        """Time of a step, as predicted."""

    @property
    @abstractmethod
    def num_replicas(self) -> int:
        """Replicas of the model."""

    @property
    @abstractmethod
    def sharing_replicas(self) -> int:
        """How many of them share the experts: each has some of its own."""

    @property
    @abstractmethod
    def forward_s(self) -> float:
        """Time of the forward of a round of all replicas, as predicted."""

    @property
    def tokens_per_step(self) -> int:
        return self.workload.tokens_per_step

    @property
    def tokens_per_s(self) -> float:
        """As predicted."""
        return self.tokens_per_step / self.step_s

    @property
    def pieces(self) -> int:
        """Slices of a sequence that a chunk of the data is cut into."""
        return self.workload.chunks_per_sequence

    @property
    def chunks_per_step(self) -> int:
        return self.workload.chunks_per_round * self.workload.rounds_per_step

    @property
    def chunks_of_a_replica(self) -> int:
        return self.chunks_per_step // self.num_replicas

    def shape(self, data: Documents) -> ChunkShape:
        """Of the chunks of the data; one that is computed in slices has a document of its own."""
        packing, tokens = self.workload.packing, self.workload.chunk_tokens * self.pieces
        most = 1 + -(-tokens // data.longest) if packing is None else packing.most_sequences
        return ChunkShape(tokens, data.longest, most, packing is None, data.sides)

    def chunks(self, data: RunData, seed: int, start: Position = Position()) -> ChunkStream:  # noqa: B008 - frozen
        """The data in such chunks, from a position on."""
        shape = self.shape(data)
        return data.chunks(
            chunk_tokens=shape.chunk_tokens, most_documents=shape.most_documents, seed=seed,
            start=start, alone=shape.alone,
        )  # fmt: skip


@dataclass(frozen=True)
class DevicePlan(StepPlan):
    """One device's plan of some of a run's steps, predicted with the profile `machine`."""

    schedule: Schedule
    predicted: Timeline
    machine: Machine
    num_ranks = num_replicas = sharing_replicas = 1
    states = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What an attention library that is not installed here costs, and what wears a drive."""
        own = self.schedule.only
        told = missing_attention_notes(own, self.machine)
        wear = wear_notes(self.schedule, self.machine, self.step_s)
        return tuple(f"note: {line}" for line in (*told, *wear))

    @property
    def workload(self) -> Workload:
        return self.schedule.workload

    @property
    def recipe(self) -> Recipe:
        """What the schedule computes."""
        return Recipe.model_validate(self.schedule.recipe)

    @property
    def step_s(self) -> float:
        return self.predicted.step_ns / 1e9

    @property
    def forward_s(self) -> float:
        return simulate(self.evaluation(), self.machine).step_ns / 1e9

    @property
    def checkpoint_bytes(self) -> int:
        """Of its weights and optimizer state on the disk."""
        return checkpoint_bytes(self.schedule.only)

    @property
    def parts(self) -> list[RankPart]:
        """What each rank does."""
        return [RankPart.alone(self.schedule.only)]

    def evaluation(self) -> Schedule:
        """The forward of the schedule by itself, in the same arenas.

        Raises:
            TwinstreamError: it has no forward of its own.
        """
        return Schedule.of_rank(evaluation_of(self.schedule.only))

    def started(self, task: TrainTask, backend: BackendName, tell: Tell, timeout_s: float) -> Ranks:
        """The ranks, which begin to train.

        Args:
            timeout_s: how long a rank may keep the others waiting.
        """
        from twinstream.executor.launch.local_rank import LocalRank

        # of the last two passes the last is never begun: one is timed, and runs without graphs
        modules = ModulePrograms(task.buffers)
        options = RunOptions(
            backend,
            task.num_passes,
            timed_passes=2,
            tell=tell,
            modules=modules,
            disk=task.disk[0] if task.disk else None,
        )
        return LocalRank(self.schedule.only, task, options)

    def measured(self, outcomes: "list[RankOutcome]", num_steps: int) -> Timeline:
        """The timeline of what the ranks did."""
        return Timeline.of_rank(outcomes[0].timeline)

    def summary(self, timeline: Timeline | None = None) -> Summary:
        """Headline figures of a timeline, by default the predicted one."""
        return summarize(self.schedule, timeline or self.predicted, self.machine)

    def write(self, files: RunFiles) -> None:
        """Write the plan into the folder of a run, in place of what other plans left there."""
        files.forget_ranks()
        write_document(self.schedule, files.plan)

    def write_comparison(self, files: RunFiles, measured: Timeline) -> str | None:
        """Write predicted beside measured, op by op.

        Returns:
            A sentence if other programs had the cores while it was measured.
        """
        write_document(self.schedule, files.plan)
        comparison = compare(self.schedule, self.predicted, measured)
        write_document(comparison, files.comparison)
        return comparison.disturbed


def recipe_of(
    options: TrainOptions, here: LocalMachine, spec: AnyModel, packed: Packed = True
) -> Recipe:
    """What decides the bits of the run, beside the data.

    Args:
        packed: lengths of documents that a chunk packs, as they are expected, where they are known.

    Raises:
        TwinstreamError: kernels, adapters or what is frozen are none of this model.
    """
    kernels: KernelChoice | None = None
    if options.kernels is not None or options.attention is not None:
        attention = attention_for(
            here.machine, spec, options.attention or "auto",
            nondeterministic=options.nondeterministic, packed=packed, here=here.is_here,
        )  # fmt: skip
        kernels = kernels_for(here.machine, options.kernels or "auto", attention)
    elif here.machine.device == "cpu":
        kernels = KernelChoice()
    else:
        kernels = usual_kernels(here.machine, spec, packed=packed, here=here.is_here)
    return recipe_without_kernels(options, spec).model_copy(update={"kernels": kernels})


def recipe_without_kernels(options: TrainOptions, spec: AnyModel) -> Recipe:
    """The recipe as far as no machine is asked.

    Raises:
        TwinstreamError: the optimizer, adapters or what is frozen are none of this model.
    """
    betas = {"beta1": options.beta1, "beta2": options.beta2}
    given = {name: beta for name, beta in betas.items() if beta is not None}
    recipe = options.recipe(
        spec, adapter_of(options, spec), eps=options.eps, weight_decay=options.weight_decay,
        clips=options.max_grad_norm > 0, optimizer=_device_place(options), **given,
    )  # fmt: skip
    if kind_of_loss(options.loss).sides > 1:
        require_packs(spec)
    if options.base != "model" and recipe.lora is None:
        raise OptionsError(
            f"base: one in {options.base} is only read, and a run without adapters writes all "
            "weights: train adapters beside it, --lora r=16, or leave out --base"
        )
    if isinstance(recipe.update, OwnRule):
        from twinstream.executor.kernels.updates.element_step import check_own_rule

        check_own_rule(recipe.update)
    return recipe


def _device_place(options: TrainOptions) -> OptimizerPlace:
    """Where the device makes updates, if it does."""
    return "device_after_backward" if options.optimizer == "device_after_backward" else "device"


def adapter_of(options: TrainOptions, spec: AnyModel) -> Lora | None:
    """The LoRA of the adapter that is gone on from; None without one, and of a traced model, whose
    adapters are in it.

    Raises:
        TwinstreamError: it is none of this model, or not what --lora says.
    """
    if options.adapter is None:
        return None
    from twinstream.executor.providers.registry import provider_of

    found = provider_of(spec).lora_in(options.adapter, spec)
    if found is None or options.lora is None:
        return found
    if lora_there(require_decoder(spec), lora_of(options.lora)) != found:
        raise OptionsError(f"lora: {options.adapter} has {found.text}: leave out --lora")
    return found


def plan_of(
    options: TrainOptions, here: LocalMachine, spec: AnyModel, recipe: Recipe, data: Documents,
    result: Result | None = None,
) -> DevicePlan:  # fmt: skip
    """Plan with documents packed side by side; where no chunk holds the longest, in slices of one.

    In slices each document is a sequence of its own, filled up with padding; so it is for a traced
    module that does not keep packed documents apart, a document a chunk unless more are asked for.

    Args:
        result: of a plan of forward passes alone, what they hand out; None is a plan of training.

    Raises:
        InfeasiblePlan: nothing fits the caps; it says what would do.
    """
    longest = packed_length(options)
    lengths = data.lengths()
    slices_only = options.chunk_tokens is not None and options.chunk_tokens < longest
    slices_only = slices_only and recipe.loss.sides == 1
    alone = not spec.is_packed
    padded = alone and not spec.inputs
    step = TrainingStep(
        longest, options.tokens_per_step, options.chunk_tokens or (longest if padded else None),
        options.chunks_per_round, recipe=recipe,
        packing=None if slices_only or alone else expected_packing(lengths, longest),
        forward_only=result is not None, result=result or "loss",
    )  # fmt: skip
    try:
        plan = planned(options, here, spec, step)
    except InfeasiblePlan:
        if slices_only or recipe.loss.sides > 1 or not spec.slices_sequences:
            raise
        step = replace(step, packing=None)
        plan = planned(options, here, spec, step)
    wanted = (options.epochs or 1.0) * data.epoch_tokens
    if result is not None:
        most = -(-data.epoch_tokens // longest) * longest
        if options.tokens_per_step or plan.tokens_per_step <= most:
            return plan
        return planned(options, here, spec, replace(step, tokens_per_step=most))
    if options.steps or options.tokens_per_step or wanted >= FEW_STEPS * plan.tokens_per_step:
        return plan
    tokens = max(1, int(wanted / FEW_STEPS / longest)) * longest  # few data: smaller steps
    return planned(options, here, spec, replace(step, tokens_per_step=tokens))


def packed_length(options: TrainOptions) -> int:
    """Tokens of the longest that has to be in one chunk: of a document, or both of a pair."""
    return options.seq_len * kind_of_loss(options.loss).sides


def plan_again(
    options: TrainOptions, here: LocalMachine, spec: AnyModel, recipe: Recipe, was: Workload
) -> DevicePlan:
    """Plan the same chunks and rounds for what there is now.

    Raises:
        InfeasiblePlan: nothing fits the caps; it says what would do.
    """
    return planned(options, here, spec, step_again(recipe, was))


def step_again(recipe: Recipe, was: Workload) -> TrainingStep:
    """A step of the same chunks and rounds."""
    packing = was.packing
    if packing is not None:
        units = was.chunk_tokens // was.seq_len
        expected = packing.expected_lengths[: len(packing.expected_lengths) // units]
        packing = type(packing)(
            most_sequences=packing.most_sequences // units, expected_lengths=expected
        )
    return TrainingStep(
        was.seq_len, was.tokens_per_step, was.chunk_tokens, was.chunks_per_round, recipe=recipe,
        packing=packing,
    )  # fmt: skip


def planned(
    options: TrainOptions, here: LocalMachine, spec: AnyModel, step: TrainingStep
) -> DevicePlan:
    """One plan, and its prediction."""
    level = None if options.recompute is None else recompute_level(options.recompute)
    request = PlanRequest.of(
        spec, here.machine, step=step, device_mem=here.device_mem, host_mem=here.host_mem,
        disk_mem=here.disk_mem, policy=options.policy,
        choices=Choices(recompute=level, optimizer=options.update_places),
    )  # fmt: skip
    try:
        schedule = Planner(steady_state).plan(request)
    except InfeasiblePlan as error:  # caps are of what is free where none was given
        caps = (("device", options.device_mem), ("host", options.host_mem))
        raise error.of_caps([side for side, size in caps if size is not None]) from None
    return DevicePlan(schedule, simulate(schedule, here.machine), here.machine)


def expected_packing(lengths: NDArray[np.int64], longest: int) -> Packing:
    """Of `longest` tokens of a chunk: lengths at even quantiles of the data's, scaled to fill it.

    Args:
        lengths: [D], tokens of sampled documents, none longer than `longest`.

    >>> expected_packing(np.array([10, 10, 40, 40]), 100).expected_lengths
    (10, 10, 40, 40)
    """
    count = min(_MOST_EXPECTED, max(1, round(longest / float(lengths.mean()))))
    at = (np.arange(count) + 0.5) / count
    chosen = np.quantile(lengths, at, method="inverted_cdf").astype(np.float64)
    bounds = np.rint(np.cumsum(chosen) * (longest / chosen.sum())).astype(np.int64)
    found = np.diff(bounds, prepend=0)
    found = found[found > 0]
    most = min(longest, _ROOM * count + _MORE_ROOM)
    return Packing(most_sequences=most, expected_lengths=tuple(found.tolist()))
