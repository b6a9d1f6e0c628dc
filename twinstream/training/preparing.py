"""From options to all that a run needs before its first step: model, data, plan, prediction."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import ceil
from pathlib import Path

from twinstream.data.options import DataOptions
from twinstream.data.training_data import TrainingData
from twinstream.log.run_files import RunFiles
from twinstream.measures.metrics import Summary, summarize
from twinstream.models.freezing import trained_of
from twinstream.models.presets import load_model, preset_names
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
from twinstream.training.amounts import source_of, steps_of
from twinstream.training.checkpoints import Checkpoint
from twinstream.training.expected import expected_packing
from twinstream.training.machine import Here
from twinstream.training.options import OptionsError, TrainOptions
from twinstream.training.rates import LearningRate

_FRESH_RATE, _GIVEN_RATE, _LORA_RATE = 3e-4, 2e-5, 2e-4
_MANY_EPOCHS = 20
_FEW_STEPS = 20  # where tokens per step are open, so many steps at least
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        folder: the Hugging Face folder that its weights come from; None where they are random.
        files: a folder with config.json, tokenizer and so on to be copied through.
    """

    spec: ModelSpec
    folder: Path | None = None
    files: Path | None = None


@dataclass(frozen=True)
class Plan:
    """A schedule for some of a run's steps, and what is predicted of it."""

    schedule: Schedule
    predicted: Timeline

    @property
    def workload(self) -> Workload:
        return self.schedule.workload

    @property
    def tokens_per_step(self) -> int:
        return self.workload.tokens_per_step

    @property
    def pieces(self) -> int:
        """Slices of a sequence that a chunk of the data is cut into."""
        return self.workload.chunks_per_sequence

    @property
    def chunks_per_step(self) -> int:
        return self.workload.chunks_per_round * self.workload.rounds_per_step


@dataclass(frozen=True)
class Prepared:
    """All that is known before the first step; nothing has been written yet."""

    options: TrainOptions
    here: Here
    model: Model
    data: TrainingData
    eval_data: TrainingData | None
    recipe: Recipe
    plan: Plan
    num_steps: int
    rate: LearningRate
    plan_seconds: float

    @property
    def tokens_per_step(self) -> int:
        return self.plan.tokens_per_step

    @property
    def summary(self) -> Summary:
        """What is predicted."""
        plan = self.plan
        return summarize(plan.schedule, plan.predicted, self.here.machine, self.plan_seconds)

    @property
    def what(self) -> str:
        """The model, and where its weights come from."""
        origin = "random weights" if self.model.folder is None else f"from {self.model.folder}"
        return f"{self.model.spec.name} ({origin}, {self.model.spec.dtype})"

    @property
    def data_line(self) -> str:
        """The data, in a line."""
        names = ", ".join(self.options.data)
        lengths = self.data.lengths()
        return (
            f"{names}: about {self.data.epoch_tokens:,} tokens an epoch, documents of "
            f"{int(lengths.mean()):,} tokens on average, {int(lengths.max()):,} at most"
        )

    @property
    def notes(self) -> list[str]:
        """What to know before it starts."""
        epochs = self.num_steps * self.tokens_per_step / max(1, self.data.epoch_tokens)
        found = [f"note: {line}" for line in self.data.warnings]
        if epochs > _MANY_EPOCHS:
            found.append(f"note: {self.num_steps:,} steps go through the data {epochs:,.0f} times")
        return found


def open_model(options: TrainOptions) -> Model:
    """The model, and the headers of its weights checked where it has some.

    Raises:
        TwinstreamError: there is no such model, or its weights are not whole.
    """
    spec = load_model(options.model)
    if options.dtype is not None:
        spec = spec.model_copy(update={"dtype": options.dtype})
    path = Path(options.model)
    if options.model in preset_names():
        return Model(spec)
    if not path.is_dir():
        return Model(spec, files=path.parent if path.name == "config.json" else None)
    from twinstream.api import require_torch

    require_torch()
    from twinstream.executor.weights.hf_folder import HfFolder

    HfFolder.open(path, spec)
    return Model(spec, folder=path, files=path)


def base_name(model: Model) -> str | None:
    """What a PEFT folder says of its base."""
    return None if model.folder is None else str(model.folder.resolve())


def open_data(options: TrainOptions, model: Model) -> tuple[TrainingData, TrainingData | None]:
    """What is trained on and, if asked for, evaluated on.

    Raises:
        DataError: a file, a row, the tokenizer or its template cannot be used.
    """
    tokenizer = options.tokenizer
    if tokenizer is None and model.files is not None:
        tokenizer = model.files if (model.files / "tokenizer.json").exists() else None
    rows = DataOptions(
        loss_on=options.loss_on, long_documents=options.long_documents,
        chat_template=options.chat_template, workers=options.data_workers,
    )  # fmt: skip

    def opened(names: tuple[str, ...], rows: DataOptions) -> TrainingData:
        return TrainingData.open(
            [source_of(name) for name in names], tokenizer, longest=options.seq_len, options=rows,
            cache=RunFiles(options.output).tokens, vocab_size=model.spec.vocab_size,
        )  # fmt: skip

    data = opened(options.data, rows)
    if not options.eval_data:
        return data, None
    return data, opened(options.eval_data, replace(rows, workers=0))


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
        attention = attention_for(here.machine, spec, options.attention or "auto")
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
        longest, options.tokens_per_step, options.chunk_tokens, recipe=recipe,
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
    if options.steps or options.tokens_per_step or wanted >= _FEW_STEPS * plan.tokens_per_step:
        return plan
    tokens = max(1, int(wanted / _FEW_STEPS / longest)) * longest  # few data: smaller steps
    return planned(options, here, spec, replace(step, tokens_per_step=tokens))


def plan_again(
    options: TrainOptions, here: Here, spec: ModelSpec, recipe: Recipe, was: Workload
) -> Plan:
    """Plan the same chunks and rounds for what there is now.

    Raises:
        InfeasiblePlan: nothing fits the caps; it says what would do.
    """
    packing = was.packing
    if packing is not None:
        units = was.chunk_tokens // was.seq_len
        expected = packing.expected_lengths[: len(packing.expected_lengths) // units]
        packing = type(packing)(
            most_sequences=packing.most_sequences // units, expected_lengths=expected
        )
    step = TrainingStep(
        was.seq_len, was.tokens_per_step, was.chunk_tokens, was.chunks_per_round, recipe=recipe,
        packing=packing,
    )  # fmt: skip
    return planned(options, here, spec, step)


def planned(options: TrainOptions, here: Here, spec: ModelSpec, step: TrainingStep) -> Plan:
    """One plan, and its prediction."""
    request = PlanRequest.of(
        spec, here.machine, step=step, device_mem=here.device_mem, host_mem=here.host_mem,
        policy=options.policy, choices=Choices(recompute=options.recompute),
    )  # fmt: skip
    schedule = Planner(steady_state).plan(request)
    return Plan(schedule, simulate(schedule, here.machine))


def prepare(options: TrainOptions, here: Here, model: Model, checkpoint: Checkpoint | None,
            tell: Tell) -> Prepared:  # fmt: skip
    """Everything before the first step.

    Raises:
        TwinstreamError: something cannot be used; nothing has been written.
    """
    tell("reading the data")
    data, eval_data = open_data(options, model)
    start = datetime.now(UTC)
    if checkpoint is None:
        recipe = recipe_of(options, here, model.spec)
        tell(f"planning {model.spec.name} for {here.machine.name}")
        plan = plan_of(options, here, model.spec, recipe, data)
    else:
        data.require_same(checkpoint.state.fingerprint)
        recipe = checkpoint.state.recipe
        tell(f"planning {model.spec.name} for {here.machine.name} again")
        plan = plan_again(options, here, model.spec, recipe, checkpoint.state.workload)
    plan_seconds = (datetime.now(UTC) - start).total_seconds()
    recipe = Recipe.model_validate(plan.schedule.recipe)
    num_steps = steps_wanted(options, data, plan.workload.tokens_per_step)
    options = resolved(options, here, model, plan, num_steps)
    return Prepared(
        options, here, model, data, eval_data, recipe, plan, num_steps,
        rate_of(options, num_steps), plan_seconds,
    )  # fmt: skip


def steps_wanted(options: TrainOptions, data: TrainingData, tokens_per_step: int) -> int:
    """Those asked for, or as many as the epochs take."""
    if options.steps is not None:
        return options.steps
    return max(1, ceil((options.epochs or 1.0) * data.epoch_tokens / tokens_per_step))


def resolved(
    options: TrainOptions, here: Here, model: Model, plan: Plan, num_steps: int
) -> TrainOptions:
    """The options with what was chosen of them, so that they alone say what the run is."""
    rate = options.learning_rate
    if rate is None:
        rate = _FRESH_RATE if model.folder is None else _GIVEN_RATE
        if "lora" in plan.schedule.recipe:
            rate = _LORA_RATE
    return options.model_copy(
        update={
            "steps": num_steps,
            "learning_rate": rate,
            "tokens_per_step": plan.workload.tokens_per_step,
            "dtype": model.spec.dtype,
            "backend": here.backend,
        }
    )


def rate_of(options: TrainOptions, num_steps: int) -> LearningRate:
    """The learning rate by step.

    Raises:
        ArgumentError: warm-up or cool-down cannot be read, or together are longer than the run.
    """
    assert options.learning_rate is not None
    warmup = steps_of("warmup", options.warmup, num_steps)
    cooldown = steps_of("cooldown", options.cooldown, num_steps)
    if warmup >= num_steps > 1 or (options.decay == "wsd" and warmup + cooldown > num_steps):
        raise OptionsError(
            f"warmup of {warmup} steps"
            + (f" and cooldown of {cooldown}" if options.decay == "wsd" else "")
            + f" do not fit a run of {num_steps} steps: shorten them, or train longer"
        )
    return LearningRate(
        options.learning_rate, num_steps, min(warmup, num_steps - 1), options.decay, options.floor,
        cooldown, options.cooldown_shape,
    )  # fmt: skip
