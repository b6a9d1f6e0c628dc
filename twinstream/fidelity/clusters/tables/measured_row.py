"""One published measurement of a training step, as a job on a cluster."""

from typing import Annotated

from pydantic import Field

from twinstream.clusters.job import Job
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.node import Node
from twinstream.schedule.numbers import PositiveCount

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ClusterTableError(TwinstreamError):
    """A file is no table of measured steps; says which columns are missing, or what is wrong."""


class Compared(Node):
    """That a row's speed is held against another's of the same set, the one of the lowest rank.

    What is compared is tokens/s per GPU. `kind` says what is told of it: `scaling` from fewest
    GPUs, `ratio` of two ways to run the same.
    """

    kind: str
    set: str
    rank: int


class ClusterRow(Node):
    """A row of a table.

    Fields:
        series: what errors are averaged over: source, GPU, precision.
        row_id: what a person calls it; unique within its series.
        family: equal for runs of one configuration on more or fewer replicas (weak scaling).
        job: None where the shapes and layouts known here cannot say what ran; `why_not` says why.
        cluster: the profile, by name.
        measured_s: seconds of a step; None where the source leaves it open.
        scored: whether it counts in errors; `why_not` tells where it does not.
        suspect: the source itself, or who collected it, doubts the number.
    """

    series: str
    row_id: str
    family: str
    gpu: str
    num_gpus: PositiveCount
    cluster: str
    job: Job | None = None
    measured_s: Seconds | None = None
    note: str = ""
    suspect: bool = False
    scored: bool = True
    why_not: str = ""
    compared: tuple[Compared, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of a step; 0 where the job is not known."""
        return self.job.global_batch * self.job.seq_len if self.job else 0

    @property
    def layout(self) -> str:
        """The layout in short: `tp8 pp12 dp16 mb1 zero1`."""
        if self.job is None:
            return ""
        layout = self.job.layout
        degrees = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "vp": layout.virtual_stages,
                   "ep": layout.ep, "dp": layout.dp}  # fmt: skip
        told = [f"{name}{size}" for name, size in degrees.items() if size > 1]
        return " ".join([*told, f"mb{layout.micro_batch}", f"zero{layout.zero}"])
