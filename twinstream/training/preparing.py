"""From options to all that a run needs before its first step: model, data, plan, prediction."""

from dataclasses import dataclass
from math import ceil
from time import perf_counter
from typing import TYPE_CHECKING

from twinstream.data.data_record import DataRecord
from twinstream.data.training_data import TrainingData
from twinstream.executor.weights.durable_files import free_bytes
from twinstream.log.run_files import RunFiles
from twinstream.measures.metrics import Summary
from twinstream.models.presets import model_notes
from twinstream.models.recipe import Recipe
from twinstream.schedule.files import read_document
from twinstream.schedule.sizes import brief
from twinstream.training.amounts import steps_of
from twinstream.training.checkpoints import Checkpoint
from twinstream.training.machine import LocalMachine, Tell
from twinstream.training.opening import Model, base_name, open_data
from twinstream.training.options import OptionsError, TrainOptions
from twinstream.training.planning import AnySummary, Plan, plan_again, plan_of, recipe_of
from twinstream.training.ranks.planning import plan_ranks
from twinstream.training.rates import LearningRate

if TYPE_CHECKING:
    from twinstream.executor.weights.checkpoint_files import Outline

_FRESH_RATE, _GIVEN_RATE, _LORA_RATE = 3e-4, 2e-5, 2e-4
_MANY_EPOCHS = 20


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """All that is known before the first step; nothing has been written yet."""

    options: TrainOptions
    here: LocalMachine
    model: Model
    data: TrainingData
    eval_data: TrainingData | None
    recipe: Recipe
    outline: "Outline"
    plan: Plan
    num_steps: int
    rate: LearningRate
    plan_seconds: float

    @property
    def summary(self) -> AnySummary:
        """What is predicted."""
        found = self.plan.summary()
        if isinstance(found, Summary):
            return found.model_copy(update={"plan_seconds": self.plan_seconds})
        return found

    @property
    def tokens_per_step(self) -> int:
        """Of the plan."""
        return self.plan.tokens_per_step

    @property
    def what(self) -> str:
        """The model, and where its weights come from."""
        origin = "random weights" if self.model.folder is None else f"from {self.model.folder}"
        if not self.model.has_weights:
            origin += ", whose weights are not there yet"
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
        told = (*model_notes(self.options.model, self.options.dtype), *self.data.warnings)
        found = [f"note: {line}" for line in told]
        if epochs > _MANY_EPOCHS:
            found.append(f"note: {self.num_steps:,} steps go through the data {epochs:,.0f} times")
        free, keep = free_bytes(self.options.output), self.options.keep
        needed_bytes = (keep + 1) * self.plan.checkpoint_bytes
        if free is not None and free < needed_bytes:
            found.append(
                f"note: there is room for {brief(free)} at {self.options.output}, and {keep} "
                f"checkpoints with one that is being written take {brief(needed_bytes)}"
            )
        if self.here.backend == "cuda":
            found.append("note: `train` is written for CUDA, and not yet run on a GPU")
        return found + self.plan.notes


def prepare(options: TrainOptions, here: LocalMachine, model: Model, checkpoint: Checkpoint | None,
            tell: Tell) -> Prepared:  # fmt: skip
    """Everything before the first step.

    Raises:
        TwinstreamError: something cannot be used, or nothing fits; nothing has been written.
    """
    tell("reading the data")
    data, eval_data = open_data(options, model)
    start_s = perf_counter()
    if checkpoint is None:
        recipe, was = recipe_of(options, here, model.spec), None
    else:
        checkpoint.require_model(model.spec)
        data = gone_on_with(data, checkpoint, options)
        recipe, was = checkpoint.state.recipe, checkpoint.state.workload
    outline = outline_for(model, recipe)
    again = "" if was is None else " again"
    plan: Plan
    if (options.ranks or 1) > 1:
        tell(f"planning {model.spec.name} for {options.ranks} ranks on {here.machine.name}{again}")
        plan = plan_ranks(options, here, model.spec, recipe, data, was)
    else:
        tell(f"planning {model.spec.name} for {here.machine.name}{again}")
        if was is None:
            plan = plan_of(options, here, model.spec, recipe, data)
        else:
            plan = plan_again(options, here, model.spec, recipe, was)
    if checkpoint is not None:
        require_unread(data, plan, checkpoint)
    plan_seconds = perf_counter() - start_s
    num_steps = steps_wanted(options, data, plan.tokens_per_step)
    options = resolved(options, here, model, plan, num_steps)
    return Prepared(
        options=options, here=here, model=model, data=data, eval_data=eval_data,
        recipe=plan.recipe, outline=outline, plan=plan, num_steps=num_steps,
        rate=rate_of(options, num_steps), plan_seconds=plan_seconds,
    )  # fmt: skip


def outline_for(model: Model, recipe: Recipe) -> "Outline":
    """Of the run's checkpoints and its DIR/model: what MODEL has of them, which may go meanwhile.

    Raises:
        TwinstreamError: they could not be written.
    """
    from twinstream.executor.weights.checkpoint_files import outline_of

    return outline_of(model.spec, model.files, recipe.lora, base_name(model))


def gone_on_with(data: TrainingData, checkpoint: Checkpoint, options: TrainOptions) -> TrainingData:
    """The data as the run began with it.

    Raises:
        DataError: it is other data.
    """
    path = RunFiles(options.output).data
    record = read_document(DataRecord, path) if path.exists() else None
    return data.gone_on_with(checkpoint.state.fingerprint, record)


def require_unread(data: TrainingData, plan: Plan, checkpoint: Checkpoint) -> None:
    """
    Raises:
        DataError: what was mended of the data has been read by the run.
    """
    position = checkpoint.state.position.position()
    data.require_unread(plan.shape(data).chunk_tokens, checkpoint.state.seed, position)


def steps_wanted(options: TrainOptions, data: TrainingData, tokens_per_step: int) -> int:
    """Those asked for, or as many as the epochs take."""
    if options.steps is not None:
        return options.steps
    return max(1, ceil((options.epochs or 1.0) * data.epoch_tokens / tokens_per_step))


def resolved(
    options: TrainOptions, here: LocalMachine, model: Model, plan: Plan, num_steps: int
) -> TrainOptions:
    """The options with what was chosen of them, so that they alone say what the run is."""
    rate = options.learning_rate
    if rate is None:
        rate = _FRESH_RATE if model.folder is None else _GIVEN_RATE
        if plan.recipe.lora is not None:
            rate = _LORA_RATE
    return options.model_copy(
        update={
            "steps": num_steps,
            "learning_rate": rate,
            "tokens_per_step": plan.tokens_per_step,
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
