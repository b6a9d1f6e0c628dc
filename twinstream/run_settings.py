"""How a schedule is run: how many steps, on what, and what of it is in no schedule."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from twinstream.schedule.errors import ArgumentError, require, require_whole

if TYPE_CHECKING:
    from twinstream.executor.program.options import RunOptions

_MOST_LEARNING_RATE = 1e3


@dataclass(frozen=True)
class RunSettings:
    """How to run a schedule; `backend` "auto" is CUDA where there is one, else the CPU.

    `on_loss` is called with the loss of every step as soon as it is there, in a thread of the run.
    `on_pinned` is told how many bytes of how many of the host arena are pinned (CUDA). `graphs` is
    auto, on or off: CUDA graphs for steps that are not timed op by op. `timed_steps`: so many of
    the last steps, beside the first, are; by default one on CUDA, all on the CPU. `nvtx` names
    every op for NVIDIA's profilers (CUDA). `skip_trained`: where a state has steps behind it,
    whether the `tokens` given are the whole stream, of which those that these took are skipped
    (True), or begin there (False); it has to be said. `max_norm`: to which the gradients of a
    recipe that clips are clipped; 0 is not at all. Without `keeps_state` nobody reads the state at
    the end, `Run.state` is empty, and none is held beside the arenas: fresh ones are put there a
    group at a time. `trusts_code`: files of Python that the schedule names, and nobody named in
    this process, may be run. `disk` is a folder on a drive for what the schedule has at home there:
    it lies in a file of the run's own, or of each rank's, which is gone when the run is.
    """

    backend: str = "auto"
    num_steps: int = 4
    learning_rate: float = 1e-3
    seed: int = 0
    poison: bool = False
    on_loss: Callable[[float], None] | None = None
    on_pinned: Callable[[int, int], None] | None = None
    graphs: str = "auto"
    timed_steps: int | None = None
    nvtx: bool = False
    skip_trained: bool | None = None
    max_norm: float = 0.0
    keeps_state: bool = True
    trusts_code: bool = False
    disk: Path | None = None

    def __post_init__(self) -> None:
        require_whole("num_steps", self.num_steps, 1, 2**31 - 1)
        require_whole("seed", self.seed, 0, 2**31 - 1)
        require("learning_rate", self.learning_rate, float, int)
        if not 0.0 <= self.learning_rate <= _MOST_LEARNING_RATE:
            raise ArgumentError(
                f"learning_rate needs a number from 0 to {_MOST_LEARNING_RATE:g}, got "
                f"{self.learning_rate}"
            )
        require("max_norm", self.max_norm, float, int)
        if not self.max_norm >= 0.0:
            raise ArgumentError(f"max_norm needs a number from 0, got {self.max_norm}")
        if self.timed_steps is not None:
            require_whole("timed_steps", self.timed_steps, 1, self.num_steps)

    def options(self) -> "RunOptions":
        """Return them as the executor is told them.

        Raises:
            TwinstreamError: what is asked for needs CUDA, or a folder that there is not.
        """
        from twinstream.executor.program.options import RunOptions, choose_graphs, choose_nvtx
        from twinstream.executor.run.execute import choose_backend
        from twinstream.executor.weights.disk_reader import DiskFiles

        backend = choose_backend(self.backend)
        if self.disk is not None and not self.disk.is_dir():
            raise ArgumentError(f"disk: {self.disk} is no folder: name one on the drive")
        return RunOptions(
            backend, self.num_steps, self.poison, self.timed_steps,
            choose_graphs(self.graphs, backend), self.on_pinned,
            nvtx=choose_nvtx(backend, requested=self.nvtx),
            disk=None if self.disk is None else DiskFiles({}, inf, place=self.disk.absolute()),
        )  # fmt: skip
