"""What both kinds of sweeps have in common: values, their errors, files beside the sweep's."""

from collections.abc import Container
from pathlib import Path

from twinstream.schedule.errors import TwinstreamError

Value = str | int | float
MACHINE_NUMBER, CLUSTER_NUMBER = "machine.", "cluster."


class SweepError(TwinstreamError):
    """A sweep's file or folder is not what it should be."""


def of_clusters(names: Container[str]) -> bool:
    """Whether a sweep of these names is of clusters, not of machines."""
    return "cluster" in names


def path_beside(folder: Path, name: str) -> str:
    """A file is meant relative to the sweep's own."""
    beside = folder / name
    return str(beside) if beside.is_file() else name
