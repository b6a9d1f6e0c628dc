"""The loss over held-out data, between two steps, in the arenas of the training."""

from typing import TYPE_CHECKING, Any

from twinstream.data.packing import Chunk, empty_chunk
from twinstream.data.training_data import TrainingData
from twinstream.executor.program.options import BackendName, RunOptions
from twinstream.log.metrics import EvalMetrics
from twinstream.planner.evaluate.evaluation import evaluation_of
from twinstream.schedule.errors import TwinstreamError
from twinstream.training.planning import Plan
from twinstream.training.run.batches import StepData, tokens_of

if TYPE_CHECKING:
    from twinstream.executor.run.evaluation import EvaluationBatch


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
        self._passes = _passes(plan, data, most_tokens)
        if not any(one.targets for one in self._passes):
            raise TwinstreamError("eval_data: no label counts: there is no loss to evaluate")

    def evaluate(self, memory: Any, backend: BackendName, step: int) -> EvalMetrics:
        """Loss and perplexity of the weights after a step."""
        from twinstream.executor.run.evaluation import evaluate_in

        batches = [self._batch(one) for one in self._passes]
        found = evaluate_in(self.schedule, memory, batches, RunOptions(backend))
        return EvalMetrics(
            step=step,
            loss=found.loss,
            perplexity=found.perplexity,
            tokens=sum(one.tokens for one in self._passes),
            seconds=found.seconds,
        )

    def _batch(self, one: StepData) -> "EvaluationBatch":
        import torch

        from twinstream.executor.run.evaluation import EvaluationBatch

        count = len(one.chunks) * self._pieces
        tokens = [tokens_of(one.chunks, index, self._pieces) for index in range(count)]
        lengths = [chunk.lengths for chunk in one.chunks] if self._packed else None
        return EvaluationBatch([torch.from_numpy(ids) for ids in tokens], one.targets, lengths)


def _passes(plan: Plan, data: TrainingData, most_tokens: int) -> list[StepData]:
    """The data once, or its first chunks; the last pass filled up with empty ones."""
    shape = plan.shape(data)
    most = max(1, most_tokens // shape.chunk_tokens)
    chunks: list[Chunk] = []
    with plan.chunks(data, seed=0) as stream:
        for chunk in stream:
            chunks.append(chunk)
            if stream.position.epoch or len(chunks) == most:
                break
        after = stream.position
    each = plan.workload.chunks_per_round // plan.pieces
    chunks += [empty_chunk(shape)] * (-len(chunks) % each)
    return [StepData.of(tuple(chunks[at : at + each]), after) for at in range(0, len(chunks), each)]
