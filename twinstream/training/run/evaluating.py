"""The loss over held-out data, between two steps, in the arenas of the training."""

from time import perf_counter

from twinstream.data.packing import Chunk, empty_chunk
from twinstream.data.training_data import TrainingData
from twinstream.log.metrics import EvalMetrics
from twinstream.schedule.errors import TwinstreamError
from twinstream.training.ranks.planning import Plan
from twinstream.training.run.steps import StepData, batch_of
from twinstream.training.server import TrainerServer


class Evaluator:
    """Has ranks at rest evaluate; the same data every time, a share for each replica.

    Attributes:
        schedule: the forward of the plan by itself.

    Args:
        most_tokens: of the data, with padding.

    Raises:
        TwinstreamError: the plan has no forward of its own, or no label of the data counts.
    """

    def __init__(self, plan: Plan, data: TrainingData, most_tokens: int) -> None:
        self.schedule = plan.evaluation()
        each = plan.workload.chunks_per_round
        self._passes = _passes_over(
            data, plan, each // plan.pieces * plan.num_replicas, most_tokens
        )
        self._batches = [
            tuple(batch_of(one, replica, each, plan) for one in self._passes)
            for replica in range(plan.num_replicas)
        ]

    def evaluate(self, server: TrainerServer, step: int) -> EvalMetrics:
        """Loss and perplexity of the weights after a step.

        Raises:
            TwinstreamError: a rank does not answer.
        """
        from twinstream.executor.run.evaluation import PassLoss, mean_loss

        start_s = perf_counter()
        shares = server.evaluate(self._batches)
        losses = [
            PassLoss(sum(one.loss for one in replicas), replicas[0].num_targets)
            for replicas in zip(*shares, strict=True)
        ]
        found = mean_loss(losses, perf_counter() - start_s)
        tokens = sum(one.tokens for one in self._passes)
        return EvalMetrics(
            step=step, loss=found.loss, perplexity=found.perplexity, tokens=tokens,
            seconds=found.seconds,
        )  # fmt: skip


def _passes_over(data: TrainingData, plan: Plan, each: int, most_tokens: int) -> list[StepData]:
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
