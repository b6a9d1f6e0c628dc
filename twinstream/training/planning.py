"""The plan of a run's steps, and the recipe that decides its bits."""

from dataclasses import dataclass, replace

from twinstream.data.chunk_stream import ChunkStream
from twinstream.data.order import Position
from twinstream.data.packing import ChunkShape
from twinstream.data.training_data import TrainingData
from twinstream.models.freezing import trained_of
from twinstream.models.recipe import KernelChoice, Recipe
from twinstream.models.spec import ModelSpec
from twinstream.planner.choices import Choices
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.kernel_choice import attention_for, kernels_for
from twinstream.planner.planner import Planner
from twinstream.planner.request import PlanRequest, TrainingStep
from twinstream.schedule.document import Schedule
from twinstream.schedule.timeline import Timeline
from twinstream.schedule.workload import Workload
from twinstream.simulator.replay import simulate, steady_state
from twinstream.training.checkpoints import written_names
from twinstream.training.expected import expected_packing
from twinstream.training.machine import Here
from twinstream.training.options import OptionsError, TrainOptions

FEW_STEPS = 20  # where tokens per step are open, so many steps at least


class StepPlan:
    """What a plan says of its steps' data."""

    @property
    def workload(self) -> Workload:
        """Of a step, over all who compute it."""
        raise NotImplementedError

    @property
    def tokens_per_step(self) -> int:
        return self.workload.tokens_per_step

    @property
    def checkpoint_bytes(self) -> int:
        """Of weights and optimizer state, on the disk; with adapters of theirs alone."""
        raise NotImplementedError

    @property
    def pieces(self) -> int:
        """Slices of a sequence that a chunk of the data is cut into."""
        return self.workload.chunks_per_sequence

    @property
    def chunks_per_step(self) -> int:
        return self.workload.chunks_per_round * self.workload.rounds_per_step

    def shape(self, data: TrainingData) -> ChunkShape:
        """Of the chunks of the data; one that is computed in slices has a document of its own."""
        work, packing = self.workload, self.workload.packing
        return ChunkShape(
            work.chunk_tokens * self.pieces,
            data.longest,
            2 if packing is None else packing.most_sequences,
            alone=packing is None,
        )

    def chunks(self, data: TrainingData, seed: int, start: Position = Position()) -> ChunkStream:  # noqa: B008 - frozen
        """The data in such chunks, from a position on."""
        shape = self.shape(data)
        return data.chunks(
            chunk_tokens=shape.chunk_tokens, most_documents=shape.most_documents, seed=seed,
            start=start, alone=shape.alone,
        )  # fmt: skip


@dataclass(frozen=True)
class Plan(StepPlan):
    """A schedule for some of a run's steps, and what is predicted of it."""

    schedule: Schedule
    predicted: Timeline

    @property
    def workload(self) -> Workload:
        return self.schedule.workload

    @property
    def checkpoint_bytes(self) -> int:
        roles = ("parameter", "optimizer_state")
        sizes = {
            tensor.tensor_id: tensor.size_bytes
            for tensor in self.schedule.tensors
            if tensor.parent is None and tensor.role in roles
        }
        written = written_names(list(sizes), adapters="lora" in self.schedule.recipe)
        return sum(sizes[name] for name in written)


def recipe_of(options: TrainOptions, here: Here, spec: ModelSpec) -> Recipe:
    """What decides the bits of the run, beside the data.

    Raises:
        TwinstreamError: kernels, adapters or what is frozen are none of this model.
    """
    trained = trained_of(spec, options.lora, options.freeze)
    lora = trained.lora
    if options.adapter is not None:
        from twinstream.executor.weights.peft_folder import PeftFolder

        found = PeftFolder.open(options.adapter, spec).lora
        if lora is not None and lora != found:
            raise OptionsError(f"lora: {options.adapter} is of other adapters: leave it out")
        lora = found
    kernels: KernelChoice | None = None
    if options.kernels is not None or options.attention is not None:
        attention = attention_for(
            here.machine, spec, options.attention or "auto",
            nondeterministic=options.nondeterministic, packed=True,
        )  # fmt: skip
        kernels = kernels_for(here.machine, options.kernels or "auto", attention)
    elif here.backend == "cpu":
        kernels = KernelChoice()
    return Recipe(
        beta1=options.beta1, beta2=options.beta2, eps=options.eps,
        weight_decay=options.weight_decay, gradients=options.gradients,
        optimizer_state=options.optimizer_state, clips=options.max_grad_norm > 0, kernels=kernels,
        lora=lora, frozen=trained.frozen,
    )  # fmt: skip


def plan_of(
    options: TrainOptions, here: Here, spec: ModelSpec, recipe: Recipe, data: TrainingData
) -> Plan:
    """Plan with documents packed side by side; where no chunk holds the longest, in slices of one.

    In slices each document is a sequence of its own, filled up with padding.

    Raises:
        InfeasiblePlan: nothing fits the caps; it says what would do.
    """
    longest = options.seq_len
    lengths = data.lengths()
    slices_only = options.chunk_tokens is not None and options.chunk_tokens < longest
    step = TrainingStep(
        longest, options.tokens_per_step, options.chunk_tokens, options.chunks_per_round,
        recipe=recipe,
        packing=None if slices_only else expected_packing(lengths, longest),
    )  # fmt: skip
    try:
        plan = planned(options, here, spec, step)
    except InfeasiblePlan:
        if slices_only:
            raise
        step = replace(step, packing=None)
        plan = planned(options, here, spec, step)
    wanted = (options.epochs or 1.0) * data.epoch_tokens
    if options.steps or options.tokens_per_step or wanted >= FEW_STEPS * plan.tokens_per_step:
        return plan
    tokens = max(1, int(wanted / FEW_STEPS / longest)) * longest  # few data: smaller steps
    return planned(options, here, spec, replace(step, tokens_per_step=tokens))


def plan_again(
    options: TrainOptions, here: Here, spec: ModelSpec, recipe: Recipe, was: Workload
) -> Plan:
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


def planned(options: TrainOptions, here: Here, spec: ModelSpec, step: TrainingStep) -> Plan:
    """One plan, and its prediction."""
    request = PlanRequest.of(
        spec, here.machine, step=step, device_mem=here.device_mem, host_mem=here.host_mem,
        policy=options.policy, choices=Choices(recompute=options.recompute),
    )  # fmt: skip
    schedule = Planner(steady_state).plan(request)
    return Plan(schedule, simulate(schedule, here.machine))
