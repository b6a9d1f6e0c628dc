"""What a call of the campaign is to do."""

from dataclasses import dataclass
from typing import Literal

from benchmarks.gpu.jobs.campaign import Backend, Size, Stage

AUTO = "auto"
Vector = Literal["auto", "eager", "triton"]


@dataclass(frozen=True)
class Settings:
    """Stages, and with which kernels (or `auto`); `presets` are those on whose shapes it probes."""

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
