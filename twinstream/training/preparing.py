"""From options to all that a run needs before its first step: model, data, plan, prediction."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from time import perf_counter

from twinstream.data.training_data import TrainingData
from twinstream.measures.metrics import Summary, summarize
from twinstream.models.recipe import Recipe
from twinstream.schedule.workload import Workload
from twinstream.training.amounts import steps_of
from twinstream.training.checkpoints import Checkpoint
from twinstream.training.machine import Here
from twinstream.training.opening import Model, open_data
from twinstream.training.options import OptionsError, TrainOptions
from twinstream.training.planning import Plan, StepPlan, plan_again, plan_of, recipe_of
from twinstream.training.rates import LearningRate

_FRESH_RATE, _GIVEN_RATE, _LORA_RATE = 3e-4, 2e-5, 2e-4
_MANY_EPOCHS = 20
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Opened:
    """All but the plan that is known before the first step; nothing has been written yet."""

    options: TrainOptions
    here: Here
    model: Model
    data: TrainingData
    recipe: Recipe
    num_steps: int
    rate: LearningRate
    plan_seconds: float

    @property
    def step_plan(self) -> StepPlan:
        """What the plan says of the data."""
        raise NotImplementedError

    @property
    def tokens_per_step(self) -> int:
        """Of the plan."""
        return self.step_plan.tokens_per_step

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
        found = [f"note: {line}" for line in self.data.warnings]
        if epochs > _MANY_EPOCHS:
            found.append(f"note: {self.num_steps:,} steps go through the data {epochs:,.0f} times")
        if self.here.backend == "cuda":
            found.append("note: `train` is written for CUDA, and not yet run on a GPU")
        return found


@dataclass(frozen=True, kw_only=True)
class Prepared(Opened):
    """All that is known before the first step; nothing has been written yet."""

    eval_data: TrainingData | None
    plan: Plan

    @property
    def step_plan(self) -> StepPlan:
        """The plan, which is of one device."""
        return self.plan

    @property
    def summary(self) -> Summary:
        """What is predicted."""
        plan = self.plan
        return summarize(plan.schedule, plan.predicted, self.here.machine, self.plan_seconds)


def prepare(options: TrainOptions, here: Here, model: Model, checkpoint: Checkpoint | None,
            tell: Tell) -> Prepared:  # fmt: skip
    """Everything before the first step.

    Raises:
        TwinstreamError: something cannot be used; nothing has been written.
    """
    tell("reading the data")
    data, eval_data = open_data(options, model)
    start_s = perf_counter()
    if checkpoint is None:
        recipe = recipe_of(options, here, model.spec)
        tell(f"planning {model.spec.name} for {here.machine.name}")
        plan = plan_of(options, here, model.spec, recipe, data)
    else:
        data.require_same(checkpoint.state.fingerprint)
        recipe = checkpoint.state.recipe
        tell(f"planning {model.spec.name} for {here.machine.name} again")
        plan = plan_again(options, here, model.spec, recipe, checkpoint.state.workload)
    plan_seconds = perf_counter() - start_s
    recipe = Recipe.model_validate(plan.schedule.recipe)
    num_steps = steps_wanted(options, data, plan.workload.tokens_per_step)
    options = resolved(options, here, model, recipe, plan.workload, num_steps)
    return Prepared(
        options=options, here=here, model=model, data=data, eval_data=eval_data, recipe=recipe,
        plan=plan, num_steps=num_steps, rate=rate_of(options, num_steps),
        plan_seconds=plan_seconds,
    )  # fmt: skip


def steps_wanted(options: TrainOptions, data: TrainingData, tokens_per_step: int) -> int:
    """Those asked for, or as many as the epochs take."""
    if options.steps is not None:
        return options.steps
    return max(1, ceil((options.epochs or 1.0) * data.epoch_tokens / tokens_per_step))


def resolved(
    options: TrainOptions, here: Here, model: Model, recipe: Recipe, workload: Workload,
    num_steps: int,
) -> TrainOptions:  # fmt: skip
    """The options with what was chosen of them, so that they alone say what the run is."""
    rate = options.learning_rate
    if rate is None:
        rate = _FRESH_RATE if model.folder is None else _GIVEN_RATE
        if recipe.lora is not None:
            rate = _LORA_RATE
    return options.model_copy(
        update={
            "steps": num_steps,
            "learning_rate": rate,
            "tokens_per_step": workload.tokens_per_step,
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
