"""The names of the files in a run's folder."""

import shutil
from pathlib import Path

from twinstream.hardware_profiles.clusters.loader import node_file
from twinstream.log.metrics import FILE, StepMetrics, events_of_kind, read_metrics
from twinstream.schedule.files import DocumentError, is_leftover, reason_of

PLAN, OPTIONS, COMPARISON, MACHINE = "plan.json", "run.toml", "comparison.json", "machine.toml"
# Where several ranks train: in place of plan.json, and what it was predicted with and measured.
CLUSTER, PROFILE, LAYOUTS = "cluster.json", "cluster.toml", "layouts.json"
MEASURED = "measured.json"
DATA = "data.json"  # in which blocks the data is read
REFERENCE = "reference.npz"  # of DPO: what it compares with
MODEL, TENSORBOARD, TOKENS = "model", "tensorboard", "tokens"


class RunFiles:
    """The paths of the files in a run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metrics, self.options = folder / FILE, folder / OPTIONS
        self.plan, self.comparison = folder / PLAN, folder / COMPARISON
        self.cluster, self.profile = folder / CLUSTER, folder / PROFILE
        self.node = node_file(self.profile)
        self.layouts, self.measured = folder / LAYOUTS, folder / MEASURED
        self.machine, self.tensorboard = folder / MACHINE, folder / TENSORBOARD
        self.data, self.reference = folder / DATA, folder / REFERENCE
        self.model, self.tokens = folder / MODEL, folder / TOKENS

    @property
    def read(self) -> tuple[Path, ...]:
        """The files that the page of a run is made from."""
        return (
            self.metrics, self.options, self.plan, self.comparison, *self._of_ranks
        )  # fmt: skip

    @property
    def _of_ranks(self) -> tuple[Path, ...]:
        return self.cluster, self.profile, self.node, self.layouts, self.measured

    def forget_ranks(self) -> None:
        """Remove the files of a run on ranks, before one device goes on."""
        if self.cluster.exists():
            self.comparison.unlink(missing_ok=True)
        for path in self._of_ranks:
            path.unlink(missing_ok=True)

    def forget_one_device(self) -> None:
        """Remove the plan of one device and earlier measurements, before ranks train."""
        for path in (self.plan, self.comparison, self.measured):
            path.unlink(missing_ok=True)

    def has_steps(self) -> bool:
        """Return whether a step was trained: one is logged, or kept in a checkpoint."""
        if any(self.folder.glob("checkpoint-*")) or self.model.exists():
            return True
        events = read_metrics(self.metrics) if self.metrics.exists() else []
        return bool(events_of_kind(events, StepMetrics))

    def others(self) -> list[Path]:
        """Return the folder's files but those of a run that was killed before it began."""
        ours = self.tokens
        return [p for p in sorted(self.folder.iterdir()) if p != ours and not is_leftover(p)]

    def remove_leftovers(self) -> None:
        """Remove what was being written when a run was killed; the folder is held."""
        for path in (*self.folder.glob("**/*.partial"), *self.folder.glob("*.incomplete")):
            if is_leftover(path) and path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif is_leftover(path):
                path.unlink(missing_ok=True)

    def make(self) -> None:
        """
        Raises:
            DocumentError: the folder cannot be made.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DocumentError(
                f"cannot make the folder {self.folder}: {reason_of(error)}"
            ) from None
