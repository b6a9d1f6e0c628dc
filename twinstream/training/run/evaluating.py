"""The loss over held-out data, between two steps, in the arenas of the training."""

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from twinstream.data.packing import Chunk
from twinstream.log.metrics import EvalMetrics, PairMetrics
from twinstream.schedule.errors import TwinstreamError
from twinstream.training.planning import RunData
from twinstream.training.ranks.planning import Plan
from twinstream.training.run.pairs import log_probs_of, pair_metrics
from twinstream.training.run.steps import ReferenceOf, StepData, batch_of, passes_of
from twinstream.training.server import TrainerServer

if TYPE_CHECKING:
    from twinstream.executor.run.evaluation import PassLoss


class Evaluator:
    """Has ranks at rest evaluate; the same data every time, a share for each replica.

    Args:
        passes: over the data.
        reference: where the loss is of pairs.
        is_cross_entropy: whether a loss has a perplexity, as one of one's own has not.

    Raises:
        TwinstreamError: the reference does not know a pair.
    """

    def __init__(
        self,
        plan: Plan,
        passes: Sequence[StepData],
        reference: ReferenceOf | None,
        *,
        is_cross_entropy: bool,
    ) -> None:
        each = plan.workload.chunks_per_round
        self._plan, self._passes, self._reference = plan, passes, reference
        self._is_cross_entropy = is_cross_entropy
        self._batches = [
            tuple(batch_of(one, replica, each, plan, reference) for one in passes)
            for replica in range(plan.num_replicas)
        ]

    def evaluate(self, server: TrainerServer, step: int) -> EvalMetrics:
        """Loss of the weights after a step, and its perplexity; of pairs what became of them.

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
        preference = self._preference(shares)
        return EvalMetrics(
            step=step, loss=found.loss, tokens=tokens, seconds=found.seconds,
            perplexity=found.perplexity if self._is_cross_entropy else None, preference=preference,
        )  # fmt: skip

    def _preference(self, shares: "Sequence[Sequence[PassLoss]]") -> PairMetrics | None:
        if self._reference is None:
            return None
        chunks = [chunk for one in self._passes for chunk in one.chunks]
        reference, scale = list(map(self._reference, chunks)), self._plan.recipe.loss.reward_scale
        return pair_metrics(chunks, list(log_probs_of(shares)), reference, scale)


def passes_over(data: RunData, plan: Plan, most_tokens: int) -> list[StepData]:
    """The data once, or its first chunks; the last pass is filled up with empty ones.

    Args:
        most_tokens: of the data, with padding.

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
    passes = list(passes_of(chunks, plan, data.empty_chunk(shape)))
    if not any(one.targets for one in passes):
        raise TwinstreamError("eval_data: no label counts: there is no loss to evaluate")
    return passes
