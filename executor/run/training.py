"""The host's work in a training run: feed tokens and step state, take losses and norms out."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from twinstream.executor.kernels.attention.implementation import Starts
from twinstream.executor.kernels.step_state import packed_step_state
from twinstream.executor.program.host_work import HostWork
from twinstream.models.kernel_costs.attention_shape import lengths_text
from twinstream.models.providers.model import model_of
from twinstream.models.providers.traced_parts import SAMPLE
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.ops import Feed, Fetch
from twinstream.schedule.tensors import Tensor
from twinstream.schedule.workload import Workload

# (step, index of the chunk in the step) -> ids and labels, int32 [2, chunk_tokens]
TokenSource = Callable[[int, int], torch.Tensor]
# the same -> lengths of the chunk's sequences, in their order; they add up to chunk_tokens
LengthSource = Callable[[int, int], tuple[int, ...]]
# the same, and a name -> that tensor of a chunk's samples
SampleSource = Callable[[int, int, str], torch.Tensor]
# (step, index) -> log-probabilities of a chunk's pairs by the reference, float32 [2, pairs]
ReferenceSource = Callable[[int, int], torch.Tensor]


@dataclass
class Training:
    """A run's data and hyperparameters that are not part of the recipe; collects its losses.

    `first_step` counts optimizer steps from 1 and goes on where an earlier run stopped. Where
    sequences of any lengths are packed, those of a chunk are `lengths`, by default as expected.
    `num_targets` are the labels of a step that count (>= 0), by default all; of a loss of pairs
    they are pairs, by default those of the expected lengths. The learning rate may be a function of
    the step. Where the recipe clips, `max_norm` is the largest norm of a step's gradients, 0 is
    any, and `norms` are those before they were clipped.

    Where the recipe has a loss of pairs, `reference` is what it compares with, by default 0 for
    pairs of the expected lengths; the loss is the mean over `num_targets` pairs, and `log_probs`
    has those of the chunks of a round, by sink and round after round: [2 P] of the two sequences of
    each pair that a chunk has room for, 0 where there is none.

    `samples` are the tensors of a model that takes some of each sample, by default what it fills up
    samples with.

    Where a step begins with the updates of the one before, it is fed the numbers of that one; up to
    step `flushed_step` all updates are made already, by default those before the first step.
    """

    tokens: TokenSource
    learning_rate: float | Callable[[int], float]
    seed: int
    first_step: int = 1
    lengths: LengthSource | None = None
    num_targets: Callable[[int], int] | None = None
    max_norm: float = 0.0
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    log_probs: dict[str, list[NDArray[np.float32]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    reference: ReferenceSource | None = None
    flushed_step: int | None = None
    samples: SampleSource | None = None

    def host_work(self, schedule: RankSchedule) -> HostWork:
        """
        Raises:
            TwinstreamError: there is a `max_norm`, and the schedule does not clip.
        """
        recipe = Recipe.model_validate(schedule.recipe)
        if self.max_norm and not recipe.clips:
            raise TwinstreamError(
                f"the gradients' norm is to be at most {self.max_norm:g}, but the schedule does "
                "not clip: plan with Recipe(clips=True)"
            )
        shape = (2, schedule.workload.chunk_tokens)
        inputs = {one.tensor_id: one for one in schedule.tensors if one.role == "input"}

        def feed(op: Feed, pass_index: int) -> torch.Tensor:
            step = self.first_step + pass_index
            if op.source in ("step_state", "update_state"):
                before = op.source == "update_state"
                return self._step_state(recipe, schedule.workload, step - before, updates=before)
            if op.source == "sequences":
                return self._sequences(schedule.workload, step, op.index)
            if op.source == "reference":
                return self._reference(schedule.workload, step, op.index)
            if op.source.startswith(SAMPLE):
                return self._sample(schedule, op, inputs[op.tensor], step)
            if op.source != "tokens":
                raise TwinstreamError(f"op '{op.op_id}' asks for unknown input '{op.source}'")
            tokens = self.tokens(step, op.index)
            if tokens.shape != shape or tokens.dtype != torch.int32:
                raise TwinstreamError(
                    f"chunk {op.index} of step {step} has {tokens.dtype} {list(tokens.shape)}, "
                    f"the schedule needs torch.int32 {list(shape)}: ids, then labels"
                )
            return tokens.contiguous().view(-1).view(torch.uint8)

        def fetch(op: Fetch, pass_index: int, taken: torch.Tensor) -> None:
            values, results = taken.view(torch.float32), self.results(op.sink)
            results.append(float(values.item()) if values.numel() == 1 else values.numpy().copy())

        def flushed(num_passes: int) -> None:
            self.flushed_step = self.first_step + num_passes - 1

        return HostWork(feed, fetch, flushed)

    def _sample(self, schedule: RankSchedule, op: Feed, wanted: Tensor, step: int) -> torch.Tensor:
        """A tensor of a chunk's samples, as the schedule has it."""
        name = op.source.removeprefix(SAMPLE)
        dtype, shape = getattr(torch, wanted.dtype), wanted.shape
        if self.samples is None:
            inputs = model_of(schedule.model).inputs
            fill = next(one.fill for one in inputs if one.name == name)
            found = torch.full(shape, fill, dtype=dtype)
        else:
            found = self.samples(step, op.index, name)
        if found.shape != shape or found.dtype != dtype:
            raise TwinstreamError(
                f"'{name}' of chunk {op.index} of step {step} is {found.dtype} "
                f"{list(found.shape)}, the schedule needs {dtype} {list(shape)}"
            )
        return found.contiguous().view(-1).view(torch.uint8)

    def results(self, sink: str) -> list[Any]:
        """What has been taken out so far, of a sink."""
        named: dict[str, list[float]] = {"loss": self.losses, "grad_norm": self.norms}
        return named[sink] if sink in named else self.log_probs[sink]

    def _step_state(
        self, recipe: Recipe, workload: Workload, step: int, *, updates: bool
    ) -> torch.Tensor:
        """Of a step; to make its `updates`, unless they are made."""
        made = self.first_step - 1 if self.flushed_step is None else self.flushed_step
        if updates and step <= made:
            packed = no_update()
        else:
            rate, targets = self.learning_rate, recipe.loss.num_targets(workload)
            packed = step_state(
                recipe, step,
                rate(step) if callable(rate) else rate, self.seed,
                num_targets=self.num_targets(step) if self.num_targets else targets,
                max_norm=self.max_norm,
            )  # fmt: skip
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    def _reference(self, workload: Workload, step: int, index: int) -> torch.Tensor:
        """Of the pairs that a chunk has room for: the reference's, and which of them are there."""
        assert workload.packing is not None, "pairs are of packed sequences"
        most = workload.most_pairs
        if self.reference is None:
            given = torch.zeros(2, len(workload.packing.expected_lengths) // 2)
        else:
            given = self.reference(step, index)
        if given.shape[0] != 2 or given.shape[1] > most or given.dtype != torch.float32:
            raise TwinstreamError(
                f"the reference of chunk {index} of step {step} is {given.dtype} "
                f"{list(given.shape)}, the schedule needs torch.float32 [2, pairs], of {most} "
                "pairs at most"
            )
        padded = torch.zeros(3, most)
        padded[:2, : given.shape[1]], padded[2, : given.shape[1]] = given, 1
        return padded.view(-1).view(torch.uint8)

    def _sequences(self, workload: Workload, step: int, index: int) -> torch.Tensor:
        """Where the sequences of a chunk start, and each token's position in its own."""
        packing = workload.packing
        assert packing is not None, "only packed sequences are asked for"
        lengths = self.lengths(step, index) if self.lengths else packing.expected_lengths
        most = packing.most_sequences
        fits = 1 <= len(lengths) <= most and sum(lengths) == workload.chunk_tokens
        if not fits or not 1 <= min(lengths) <= max(lengths) <= workload.seq_len:
            raise TwinstreamError(
                f"chunk {index} of step {step} has sequences of {lengths_text(lengths)} tokens; "
                f"the schedule has room for {most}, none longer than "
                f"{workload.seq_len}, that fill {workload.chunk_tokens} tokens"
            )
        return sequences_tensor(lengths, most).view(torch.uint8)


def sequences_tensor(lengths: tuple[int, ...], most_sequences: int) -> torch.Tensor:
    """Of packed sequences: cu_seqlens [most_sequences + 1], padded with its last value, and
    positions [sum of lengths], int32."""
    positions = [torch.arange(length, dtype=torch.int32) for length in lengths]
    return torch.cat([Starts.cumulative(lengths, most_sequences), *positions])


def no_update() -> bytes:
    """Return the step state of updates that have nothing to do, with which a run begins."""
    return packed_step_state(
        learning_rate=0.0, corrections=(1.0, 1.0), weight_decay=0.0, step=0, seed=0,
        loss_scale=0.0, skips=True,
    )  # fmt: skip


def step_state(
    recipe: Recipe,
    step: int,
    learning_rate: float,
    seed: int,
    *,
    num_targets: int,
    max_norm: float = 0.0,
) -> bytes:
    """The small device tensor that a step's head and optimizer tasks read.

    `num_targets` are the labels of the step that count: the loss is the mean over them.
    """
    return packed_step_state(
        learning_rate=learning_rate,
        corrections=(1.0 - recipe.beta1**step, 1.0 - recipe.beta2**step),
        weight_decay=recipe.weight_decay,
        step=step,
        seed=seed,
        loss_scale=1.0 / max(1, num_targets),
        max_norm=max_norm,
    )
