"""How much of the lent time is left."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Budget:
    """Seconds from the start of the call; the clock is an argument so that tests need not wait."""

    total_s: float
    clock: Callable[[], float] = time.monotonic
    start_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.start_s = self.clock()

    @property
    def left_s(self) -> float:
        return self.total_s - (self.clock() - self.start_s)

    def allows(self, seconds: float) -> bool:
        """Whether a job expected to take so long would end in time."""
        return seconds <= self.left_s
