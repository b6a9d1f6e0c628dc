"""What may look on while a run trains."""

from twinstream.log.metrics import CheckpointMetrics, EvalMetrics, StepMetrics
from twinstream.training.preparing import Opened


class Callback:
    """Told what happens in a run; each of these does nothing until it is overridden.

    What it raises ends the run. `Trainer.stop` asks for a checkpoint and the end.
    """

    def on_start(self, prepared: Opened) -> None:
        """Before the first step."""

    def on_step(self, metrics: StepMetrics) -> None:
        """After each, in a thread of the run: it had better be quick."""

    def on_eval(self, metrics: EvalMetrics) -> None:
        """After each evaluation."""

    def on_checkpoint(self, metrics: CheckpointMetrics) -> None:
        """Once a checkpoint is complete."""
