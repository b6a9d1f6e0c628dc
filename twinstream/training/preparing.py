"""From options to all that a run needs before its first step: model, data, plan, prediction."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from twinstream.data.data_error import DataError
from twinstream.data.data_record import DataRecord
from twinstream.data.options import DataOptions
from twinstream.data.samples import SampleData
from twinstream.data.shapes import columns_of
from twinstream.data.training_data import TrainingData
from twinstream.executor.memory.host_limits import WORKING_BYTES, process_bytes
from twinstream.executor.weights.durable_files import free_bytes
from twinstream.log.run_files import RunFiles
from twinstream.measures.metrics import Summary
from twinstream.measures.residence import groups_on_disk
from twinstream.models.kernel_costs.attention_limits import attention_limits
from twinstream.models.loss import has_function, kind_of_loss
from twinstream.models.presets import model_notes
from twinstream.models.providers.model import require_decoder
from twinstream.models.providers.trained import adapter_groups
from twinstream.models.recipes.lora import has_dropout
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.files import read_document
from twinstream.schedule.sizes import brief
from twinstream.schedule.tensors import DISK
from twinstream.tracing import path_notes
from twinstream.training.amounts import source_of, steps_of
from twinstream.training.checkpoints import Checkpoint
from twinstream.training.data_opening import opened, tokenizer_for
from twinstream.training.machine import LocalMachine, Tell
from twinstream.training.model_opening import OpenedModel, base_name, dropout_of, lora_text
from twinstream.training.options import OptionsError, TrainOptions
from twinstream.training.planning import (
    DevicePlan,
    RunData,
    expected_packing,
    packed_length,
    plan_again,
    plan_of,
    recipe_of,
)
from twinstream.training.ranks.planning import Plan, plan_ranks
from twinstream.training.rates import LearningRate

if TYPE_CHECKING:
    from twinstream.executor.providers.provider import Outline
    from twinstream.executor.weights.carried_tensors.carried import CarriedTensors

_MANY_EPOCHS = 20
_CARRIED = ("parameter", "optimizer_state")


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """All that is known before the first step; nothing has been written yet."""

    options: TrainOptions
    here: LocalMachine
    model: OpenedModel
    data: RunData
    eval_data: RunData | None
    recipe: Recipe
    outline: "Outline"
    plan: Plan
    num_steps: int
    rate: LearningRate
    plan_seconds: float

    @property
    def summary(self) -> Summary:
        """What is predicted."""
        return self.plan.summary().model_copy(update={"plan_seconds": self.plan_seconds})

    @property
    def tokens_per_step(self) -> int:
        """Of the plan."""
        return self.plan.tokens_per_step

    @property
    def is_cross_entropy(self) -> bool:
        """Whether the loss is, of each label: neither one of pairs nor one's own."""
        from twinstream.executor.providers.registry import provider_of

        own = provider_of(self.model.spec).has_own_loss(self.model.spec)
        return self.recipe.loss.has_perplexity and not own

    @cached_property
    def reference_s(self) -> float | None:
        """Time before the first step of a run for the loss's reference, as predicted."""
        if not self.recipe.loss.has_reference:
            return None
        tokens = min(self.data.epoch_tokens, self.num_steps * self.tokens_per_step)
        if self.eval_data is not None:
            tokens += min(self.eval_data.epoch_tokens, self.options.eval_tokens)
        work = self.plan.workload
        each = work.chunk_tokens * work.chunks_per_round * self.plan.num_replicas
        return ceil(tokens / each) * self.plan.forward_s

    @property
    def carried_bytes(self) -> int:
        """What a checkpoint has of tensors that are not trained here, and written as they were."""
        return 0 if (carried := self._carried) is None else carried.size_bytes

    @property
    def _carried(self) -> "CarriedTensors | None":
        return self.outline.carried

    @cached_property
    def process_memory(self) -> "ProcessMemory | None":
        """Of a run in this process on its CPU what that will take; where Linux does not tell what
        it takes now, None."""
        now, _ = process_bytes()
        is_here = self.here.backend == "cpu" and self.here.is_here
        if now is None or not is_here or not isinstance(self.plan, DevicePlan):
            return None
        return ProcessMemory.of(self.plan.schedule.only, self.summary, now)

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
        return f"{', '.join(self.options.data)}: {self.data.text}"

    @property
    def _model_notes(self) -> list[str]:
        wanted = self.options
        notes = model_notes(wanted.model, wanted.dtype)
        if has_function(wanted.loss) or wanted.trust_remote_code:
            return notes
        return notes + path_notes(wanted.model, wanted.dtype, wanted.seq_len, wanted.lora)

    @property
    def notes(self) -> list[str]:
        """What to know before it starts."""
        epochs = self.num_steps * self.tokens_per_step / max(1, self.data.epoch_tokens)
        told = (*self._model_notes, *self.data.warnings)
        found, model = [f"note: {line}" for line in told], self.model.spec
        dropout = dropout_of(self.options.adapter)
        if dropout and not has_dropout(self.options.lora):
            found.append(
                f"note: {self.options.adapter} was trained with lora_dropout = {dropout:g}; here "
                f"it is trained without (--lora r=...,dropout={dropout:g} keeps it)"
            )
        if epochs > _MANY_EPOCHS:
            found.append(f"note: {self.num_steps:,} steps go through the data {epochs:,.0f} times")
        free, keep = free_bytes(self.options.output), self.options.keep
        needed_bytes = (keep + 1) * (self.plan.checkpoint_bytes + self.carried_bytes)
        if self._carried is not None and self.carried_bytes:
            codes = f", codes as their values in {model.dtype}" if self._carried.has_codes else ""
            found.append(
                f"note: {brief(self.carried_bytes)} of {self.model.folder} are no part of what is "
                f"trained (towers, buffers): they are written back as they are{codes}"
            )
        if free is not None and free < needed_bytes:
            found.append(
                f"note: there is room for {brief(free)} at {self.options.output}, and {keep} "
                f"checkpoints with one that is being written take {brief(needed_bytes)}"
            )
        name, packing = self.recipe.implementations.attention, self.plan.workload.packing
        if packing is not None and name != "eager" and not attention_limits(name).variable_length:
            found.append(
                f"note: attention {name} is called for one document after the other, about "
                f"{len(packing.expected_lengths)} a chunk"
            )
        if self.here.backend == "cuda" and model.own_code is not None:
            found.append("note: other people's modules have not yet been run on a GPU")
        if model.unread_told is not None:
            found.append(f"note: {model.unread_told}")
        if not model.is_packed and not model.inputs:
            found.append(
                f"note: {model.own_code} does not keep packed documents apart, so each has a "
                "sequence of its own, filled up with padding"
            )
        return [*found, *self.plan.notes]


@dataclass(frozen=True)
class ProcessMemory:
    """What a process that trains on a CPU takes of the host's memory at its peak.

    Attributes:
        planned_bytes: arenas, and what libraries take while kernels run.
        before_bytes: the interpreter and libraries, before the arenas are there.
        working_bytes: beside both while it reads, computes and saves.
    """

    planned_bytes: int
    before_bytes: int
    working_bytes: int

    @classmethod
    def of(cls, schedule: RankSchedule, summary: Summary, before_bytes: int) -> "ProcessMemory":
        """
        Args:
            before_bytes: what the process takes already.
        """
        planned = summary.device_peak_bytes + summary.host_peak_bytes
        files = {slot.slot_id for slot in schedule.slots if slot.tier == DISK}
        on_disk = {item.tensor for item in schedule.carried if item.slot in files}
        read_only = {f"param.{group}" for group in groups_on_disk(schedule)}
        groups: Counter[str] = Counter()
        in_memory = 0
        for tensor in schedule.tensors:
            root = tensor.parent or tensor.tensor_id
            if tensor.role in _CARRIED and root not in read_only:
                if tensor.parent is None:  # a group is made beside the arenas, once
                    groups[root.partition(".")[2]] += tensor.size_bytes
                    in_memory += tensor.size_bytes
                if tensor.tensor_id in on_disk:
                    in_memory -= tensor.size_bytes
        untouched = planned - in_memory  # before the first step
        made = max(0, max(groups.values(), default=0) - untouched)
        return cls(planned, before_bytes, WORKING_BYTES + made)

    @property
    def total_bytes(self) -> int:
        """The whole process."""
        return self.planned_bytes + self.before_bytes + self.working_bytes

    @property
    def text(self) -> str:
        """In words: the whole and its parts."""
        return (
            f"{brief(self.total_bytes)} of this machine's: {brief(self.planned_bytes)} planned, "
            f"{brief(self.before_bytes)} interpreter and libraries, {brief(self.working_bytes)} "
            "while it reads, computes and saves"
        )


def prepare(
    options: TrainOptions, here: LocalMachine, model: OpenedModel,
    opened: tuple[RunData, RunData | None], checkpoint: Checkpoint | None, tell: Tell,
) -> Prepared:  # fmt: skip
    """Everything before the first step.

    Args:
        opened: what is trained on and, if asked for, evaluated on.

    Raises:
        TwinstreamError: something cannot be used, or nothing fits; nothing has been written.
    """
    data, eval_data = opened
    start_s = perf_counter()
    if checkpoint is None:
        packing = expected_packing(data.lengths(), packed_length(options))
        recipe, was = recipe_of(options, here, model.spec, packing.expected_lengths), None
    else:
        checkpoint.require_model(model.spec)
        checkpoint.require_parts(model.spec)
        data = gone_on_with(data, checkpoint, options)
        recipe, was = checkpoint.state.recipe, checkpoint.state.workload
    outline = outline_for(model, recipe, checkpoint)
    again = "" if was is None else " again"
    plan: Plan
    if options.on_ranks:
        tell(f"planning {model.spec.name} for {options.ranks} ranks on {here.machine.name}{again}")
        plan = plan_ranks(options, here, require_decoder(model.spec), recipe, data, was)
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


def outline_for(
    model: OpenedModel, recipe: Recipe, checkpoint: Checkpoint | None = None
) -> "Outline":
    """Of the run's checkpoints and its DIR/model: what MODEL has of them, which may go meanwhile
    but for tensors that are carried.

    Raises:
        TwinstreamError: they could not be written, or MODEL has other tensors than the checkpoint
            where both have what is not trained.
    """
    from twinstream.executor.providers.registry import provider_of
    from twinstream.executor.weights.hf_folder import stored_tensors

    outline = provider_of(model.spec).outline(model.spec, model.files, recipe, base_name(model))
    carried = outline.carried
    if checkpoint is not None and carried is not None and carried.stored:
        carried.require_same(stored_tensors(checkpoint.path))
    return outline


def gone_on_with(data: RunData, checkpoint: Checkpoint, options: TrainOptions) -> RunData:
    """The data as the run began with it.

    Raises:
        DataError: it is other data.
    """
    path = RunFiles(options.output).data
    record = read_document(DataRecord, path) if path.exists() else None
    return data.gone_on_with(checkpoint.state.fingerprint, record)


def require_unread(data: RunData, plan: Plan, checkpoint: Checkpoint) -> None:
    """
    Raises:
        DataError: what was mended of the data has been read by the run.
    """
    position = checkpoint.state.position.position()
    data.require_unread(plan.shape(data).chunk_tokens, checkpoint.state.seed, position)


def steps_wanted(options: TrainOptions, data: RunData, tokens_per_step: int) -> int:
    """Those asked for, or as many as the epochs take."""
    if options.steps is not None:
        return options.steps
    return max(1, ceil((options.epochs or 1.0) * data.epoch_tokens / tokens_per_step))


def resolved(
    options: TrainOptions, here: LocalMachine, model: OpenedModel, plan: Plan, num_steps: int
) -> TrainOptions:
    """The options with what was chosen of them, so that they alone say what the run is."""
    rate = options.learning_rate
    if rate is None:
        loss = plan.recipe.loss
        rate = loss.fresh_rate if model.folder is None else loss.given_rate
        rate = loss.adapter_rate if adapter_groups(model.spec, plan.recipe) else rate
    return options.model_copy(
        update={
            "steps": num_steps,
            "learning_rate": rate,
            "tokens_per_step": plan.tokens_per_step,
            "dtype": model.spec.dtype,
            "lora": options.lora or lora_text(model.spec, plan.recipe, options),
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


def open_data(
    options: TrainOptions, model: OpenedModel, cache: Path | None
) -> tuple[RunData, RunData | None]:
    """What is trained on and, if asked for, evaluated on.

    Args:
        cache: a folder that keeps tokens.

    Raises:
        DataError: a file, a row, the tokenizer or its template cannot be used.
    """
    of = _samples_of(model) if model.spec.inputs else texts_of(options, model, cache)
    data = of(options.data, options.data_workers)
    return data, of(options.eval_data, 0) if options.eval_data else None


def texts_of(
    options: TrainOptions, model: OpenedModel, cache: Path | None
) -> Callable[[tuple[str, ...], int], TrainingData]:
    """Opens files of text or tokens, of their names and a number of processes that tokenise.

    Raises:
        DataError: the tokenizer or its template cannot be used; or the model takes other data.
    """
    if model.spec.inputs:
        raise DataError(
            f"'{model.spec.name}' takes tensors of samples, and no text of which a token follows "
            "another"
        )
    tokenizer = tokenizer_for(
        options.tokenizer, model.files, (*options.data, *options.eval_data),
        is_random=model.folder is None,
    )  # fmt: skip
    rows = DataOptions(
        loss_on=options.loss_on, long_documents=options.long_documents,
        chat_template=options.chat_template, workers=options.data_workers,
        skip_bad_rows=options.skip_bad_rows, pairs=kind_of_loss(options.loss).sides > 1,
        columns=columns_of(options.columns) if options.columns else (),
    )  # fmt: skip

    def of(names: tuple[str, ...], workers: int) -> TrainingData:
        return opened(
            names, tokenizer, replace(rows, workers=workers), longest=options.seq_len,
            cache=cache, vocab_size=model.spec.vocab_size,
        )  # fmt: skip

    return of


def _samples_of(model: OpenedModel) -> Callable[[tuple[str, ...], int], SampleData]:
    """Opens arrays of samples."""
    from twinstream.executor.providers.registry import provider_of

    spec, limit = model.spec, model.spec.position_limit
    assert limit is not None, "a sample has so many labels"
    classes = None if provider_of(spec).has_own_loss(spec) else spec.vocab_size
    if classes == 1:
        raise OptionsError(
            f"'{spec.name}' makes one logit, whose cross entropy is 0: give a loss of your own, "
            "--loss FILE.py:FUNCTION"
        )

    def of(names: tuple[str, ...], workers: int) -> SampleData:
        sources = [source_of(name) for name in names]
        return SampleData.open(
            sources, spec.inputs, limit.tokens, classes=classes, ahead=workers > 0
        )

    return of
