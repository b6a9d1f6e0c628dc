"""The names of the files in a run's folder."""

from pathlib import Path

from twinstream.log.metrics import FILE
from twinstream.schedule.files import DocumentError, told

PLAN, OPTIONS, COMPARISON, MACHINE = "plan.json", "run.toml", "comparison.json", "machine.toml"
CLUSTER = "cluster.json"  # in place of plan.json where several ranks train
MODEL, TENSORBOARD, TOKENS = "model", "tensorboard", "tokens"


class RunFiles:
    """Paths inside a run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metrics, self.options = folder / FILE, folder / OPTIONS
        self.plan, self.comparison = folder / PLAN, folder / COMPARISON
        self.cluster = folder / CLUSTER
        self.machine, self.tensorboard = folder / MACHINE, folder / TENSORBOARD
        self.model, self.tokens = folder / MODEL, folder / TOKENS

    def make(self) -> None:
        """
        Raises:
            DocumentError: the folder cannot be made.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DocumentError(f"cannot make the folder {self.folder}: {told(error)}") from None
