"""The folder of a run: which files are where, and whether it may be used."""

from pathlib import Path

from twinstream.report.run_folder import COMPARISON, PLAN
from twinstream.schedule.files import DocumentError, told
from twinstream.training.metrics import FILE
from twinstream.training.options import OPTIONS_FILE, OptionsError

TENSORBOARD = "tensorboard"


class RunFiles:
    """Paths inside a run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metrics, self.plan = folder / FILE, folder / PLAN
        self.comparison, self.tensorboard = folder / COMPARISON, folder / TENSORBOARD

    def require_usable(self, *, resume: bool) -> None:
        """
        Raises:
            OptionsError: the folder has another run, or none to go on with, or other files.
        """
        folder, has_run = self.folder, (self.folder / OPTIONS_FILE).exists()
        if resume and not has_run:
            raise OptionsError(
                f"{folder} has no run to go on with ({OPTIONS_FILE} is missing): leave out --resume"
            )
        if resume:
            return
        if has_run:
            raise OptionsError(
                f"{folder} has a run already: go on with it (--resume), or choose another folder"
            )
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise OptionsError(
                f"{folder} is not an empty folder: choose another one for the run, or empty it"
            )

    def make(self) -> None:
        """
        Raises:
            DocumentError: it cannot be made.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DocumentError(f"cannot make the folder {self.folder}: {told(error)}") from None
