"""From the numbers that a run's passes give to the metrics of its steps."""

import math
from collections.abc import Callable
from time import perf_counter

from twinstream.log.metrics import StepMetrics
from twinstream.schedule.errors import TwinstreamError
from twinstream.training.rates import LearningRate
from twinstream.training.run.batches import StepBatches


class LossError(TwinstreamError):
    """A loss or a norm is no number."""


class StepRecorder:
    """Takes losses and norms as they come, and tells of each step once, in order.

    Args:
        num_replicas: a step's loss is the sum of theirs.
        predicted_s: of a step.
        clips: whether each step has a norm, too.
        tokens: trained before the first step here.
        epoch_tokens: of the data.
    """

    def __init__(  # noqa: PLR0913
        self,
        batches: StepBatches,
        rate: LearningRate,
        *,
        num_replicas: int,
        predicted_s: float,
        clips: bool,
        tokens: int,
        epoch_tokens: int,
        on_step: Callable[[StepMetrics], None],
    ) -> None:
        self.tokens, self.last_step = tokens, 0
        self._batches, self._rate, self._on_step = batches, rate, on_step
        self._predicted_s, self._clips, self._epoch_tokens = predicted_s, clips, epoch_tokens
        self._num_replicas = num_replicas
        self._shares: dict[tuple[str, int], dict[int, float]] = {}
        self._found: dict[str, float] = {}
        self._since_s = perf_counter()

    def take(self, sink: str, step: int, value: float, replica: int = 0) -> None:
        """Take a replica's result of a step: its share of the loss, or the norm, which all have.

        Raises:
            LossError: it is no finite number; names the step.
        """
        shares = self._shares.setdefault((sink, step), {})
        shares[replica] = value
        if len(shares) < self._num_replicas:
            return
        del self._shares[sink, step]
        values = [shares[replica] for replica in sorted(shares)]
        value = sum(values) if sink == "loss" else values[0]
        if not math.isfinite(value):
            what = "loss" if sink == "loss" else "norm of the gradients"
            raise LossError(
                f"the {what} of step {step} is {value}: the run has stopped, and its checkpoints "
                "are as they were. Go on from the last one with a lower learning_rate, look at the "
                "data of that step, or start a new run with a lower max_grad_norm"
            )
        self._found[sink] = value
        if "loss" in self._found and (not self._clips or "grad_norm" in self._found):
            self._record(step)

    def skip_time(self) -> None:
        """What went by since the last step was not a step's."""
        self._since_s = perf_counter()

    def _record(self, step: int) -> None:
        now_s, data = perf_counter(), self._batches.step(step)
        took_s, self._since_s = now_s - self._since_s, now_s
        self.tokens += data.tokens
        self.last_step = step
        metrics = StepMetrics(
            step=step,
            loss=self._found["loss"],
            learning_rate=self._rate(step),
            grad_norm=self._found.get("grad_norm"),
            tokens=data.tokens,
            targets=data.targets,
            seconds=took_s,
            tokens_per_s=data.tokens / took_s if took_s > 0 else 0.0,
            predicted_tokens_per_s=data.tokens / self._predicted_s,
            epoch=self.tokens / max(1, self._epoch_tokens),
        )
        self._found.clear()
        self._on_step(metrics)
