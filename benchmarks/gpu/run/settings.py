"""What a call of the campaign is to do."""

from dataclasses import dataclass
from typing import Literal

from benchmarks.gpu.jobs.campaign import Backend, Size, Stage

AUTO = "auto"
Vector = Literal["auto", "eager", "triton"]


@dataclass(frozen=True)
class Settings:
    """Stages, and with which kernels (or `auto`); `presets` are those on whose shapes it probes.

    `smoke` are the tests that come first, for so many seconds at most.
    """

    backend: Backend
    size: Size
    stages: tuple[Stage, ...]
    host_bytes: int | None
    num_jobs: int
    tests: tuple[str, ...]
    vector: Vector
    attention: str
    only: tuple[str, ...] = ()
    presets: tuple[str, ...] = ("8b",)
    smoke: tuple[str, ...] = ()
    smoke_s: float = 30.0

    @property
    def is_tiny(self) -> bool:
        """Whether models are tiny, as what is short is on a CPU."""
        return self.size == "tiny" or (self.size == "short" and self.backend == "cpu")
