"""The loss over held-out data, between two steps, in the arenas of the training."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from twinstream.data.packing import Chunk, empty_chunk
from twinstream.data.training_data import TrainingData
from twinstream.executor.program.options import BackendName, RunOptions
from twinstream.log.metrics import EvalMetrics
from twinstream.planner.evaluate.evaluation import evaluation_of
from twinstream.schedule.errors import TwinstreamError
from twinstream.training.planning import Plan, StepPlan
from twinstream.training.run.batches import StepData, tokens_of

if TYPE_CHECKING:
    from twinstream.executor.run.evaluation import Evaluated, EvaluationBatch


class Evaluator:
    """Evaluates the state that lies in the arenas of a plan; the same data every time.

    Args:
        most_tokens: of the data, with padding.

    Raises:
        TwinstreamError: the plan has no forward of its own, or no label of the data counts.
    """

    def __init__(self, plan: Plan, data: TrainingData, most_tokens: int) -> None:
        self.schedule = evaluation_of(plan.schedule)
        self._packed = plan.workload.packing is not None
        self._pieces = plan.pieces
        each = plan.workload.chunks_per_round // plan.pieces
        self._passes = passes_over(data, plan, each, most_tokens)

    def evaluate(self, memory: Any, backend: BackendName, step: int) -> EvalMetrics:
        """Loss and perplexity of the weights after a step."""
        from twinstream.executor.run.evaluation import evaluate_in

        pieces, packed = self._pieces, self._packed
        batches = [batch_of(one.chunks, one.targets, pieces, packed) for one in self._passes]
        found = evaluate_in(self.schedule, memory, batches, RunOptions(backend))
        return eval_metrics(step, found, self._passes)


def eval_metrics(step: int, found: "Evaluated", passes: Sequence[StepData]) -> EvalMetrics:
    """What is logged."""
    tokens = sum(one.tokens for one in passes)
    return EvalMetrics(
        step=step, loss=found.loss, perplexity=found.perplexity, tokens=tokens,
        seconds=found.seconds,
    )  # fmt: skip


def batch_of(
    chunks: tuple[Chunk, ...], targets: int, pieces: int, packed: bool
) -> "EvaluationBatch":
    """What a pass takes: chunks of the data, each computed in so many pieces."""
    import torch

    from twinstream.executor.run.evaluation import EvaluationBatch

    tokens = [tokens_of(chunks, index, pieces) for index in range(len(chunks) * pieces)]
    lengths = [chunk.lengths for chunk in chunks] if packed else None
    return EvaluationBatch([torch.from_numpy(ids) for ids in tokens], targets, lengths)


def passes_over(data: TrainingData, plan: StepPlan, each: int, most_tokens: int) -> list[StepData]:
    """The data once, or its first chunks, `each` a pass; the last one filled up with empty ones.

    Raises:
        TwinstreamError: no label of the data counts.
    """
    shape = plan.shape(data)
    most = max(1, most_tokens // shape.chunk_tokens)
    chunks: list[Chunk] = []
    with plan.chunks(data, seed=0) as stream:
        for chunk in stream:
            chunks.append(chunk)
            if stream.position.epoch or len(chunks) == most:
                break
        after = stream.position
    chunks += [empty_chunk(shape)] * (-len(chunks) % each)
    starts = range(0, len(chunks), each)
    passes = [StepData.of(tuple(chunks[at : at + each]), after) for at in starts]
    if not any(one.targets for one in passes):
        raise TwinstreamError("eval_data: no label counts: there is no loss to evaluate")
    return passes
