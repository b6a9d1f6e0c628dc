"""The loss over held-out data of the state that lies on ranks, between two steps."""

from time import perf_counter

from twinstream.clusters.evaluating import cluster_evaluation_of
from twinstream.data.training_data import TrainingData
from twinstream.log.metrics import EvalMetrics
from twinstream.schedule.cluster.projecting import RankPart
from twinstream.training.ranks.lines import Resting
from twinstream.training.ranks.messages import Evaluate, StepShare
from twinstream.training.ranks.planning import RanksPlan
from twinstream.training.run.batches import StepData
from twinstream.training.run.evaluating import eval_metrics, passes_over


class RanksEvaluator:
    """Has ranks at rest evaluate; the same data every time, a share for each replica.

    Args:
        parts: of all ranks.
        most_tokens: of the data, with padding.

    Raises:
        TwinstreamError: a stage has no forward of its own, or no label of the data counts.
    """

    def __init__(
        self, plan: RanksPlan, parts: list[RankPart], data: TrainingData, most_tokens: int
    ) -> None:
        self.schedule = cluster_evaluation_of(plan.schedule)
        self._replicas = {part.rank: part.coordinates.get("dp", 0) for part in parts}
        self._each = plan.workload.chunks_per_round // plan.pieces
        self._passes = passes_over(data, plan, self._each * plan.layout.dp, most_tokens)

    def evaluate(self, ranks: Resting, step: int) -> EvalMetrics:
        """Loss and perplexity of the weights after a step.

        Raises:
            TwinstreamError: a rank does not answer.
        """
        from twinstream.executor.run.evaluation import PassLoss, mean_loss

        start_s = perf_counter()
        requests = {
            rank: Evaluate(tuple(self._share(one, replica) for one in self._passes))
            for rank, replica in self._replicas.items()
        }
        told = ranks.evaluate(requests)
        heads = {self._replicas[rank]: found.passes for rank, found in told.items() if found.passes}
        shares = [heads[replica] for replica in sorted(heads)]
        losses = [
            PassLoss(sum(one.loss for one in replicas), replicas[0].num_targets)
            for replicas in zip(*shares, strict=True)
        ]
        found = mean_loss(losses, perf_counter() - start_s)
        return eval_metrics(step, found, self._passes)

    def _share(self, one: StepData, replica: int) -> StepShare:
        chunks = one.chunks[replica * self._each : (replica + 1) * self._each]
        return StepShare(chunks, one.targets)
