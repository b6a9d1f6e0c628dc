"""The learning rate of every step: warm up, hold or fall, and how low."""

from dataclasses import dataclass
from math import cos, pi, sqrt
from typing import Literal

Decay = Literal["constant", "linear", "cosine", "wsd"]
Cooldown = Literal["linear", "1-sqrt"]


@dataclass(frozen=True)
class LearningRate:
    """The rate as a function of the step, the first of which is 1.

    Of `warmup_steps` W steps, step k has k / (W + 1) of the peak, and step W + 1 all of it. From
    there `linear` and `cosine` fall over the steps that are left, towards `floor` (a share of the
    peak) after the last; `wsd` (warm-up, stable, decay) falls in the last `cooldown_steps` alone,
    in the shape of `cooldown` (https://arxiv.org/abs/2405.18392).

    >>> rate = LearningRate(1.0, num_steps=10, warmup_steps=1, decay="linear")
    >>> [round(rate(step), 2) for step in (1, 2, 3, 10)]
    [0.5, 1.0, 0.89, 0.11]
    """

    peak: float
    num_steps: int
    warmup_steps: int = 0
    decay: Decay = "cosine"
    floor: float = 0.0
    cooldown_steps: int = 0
    cooldown: Cooldown = "1-sqrt"

    def __call__(self, step: int) -> float:
        if step <= self.warmup_steps:
            return self.peak * step / (self.warmup_steps + 1)
        return self.peak * (self.floor + (1.0 - self.floor) * self._height(step))

    def _height(self, step: int) -> float:
        """From 1, the peak, to 0, the floor."""
        if self.decay == "constant":
            return 1.0
        if self.decay == "wsd":
            start = max(self.warmup_steps, self.num_steps - self.cooldown_steps)
        else:
            start = self.warmup_steps
        if step <= start:
            return 1.0
        done = min(1.0, (step - 1 - start) / max(1, self.num_steps - start))
        if self.decay == "cosine":
            return 0.5 * (1.0 + cos(pi * done))
        if self.decay == "wsd" and self.cooldown == "1-sqrt":
            return 1.0 - sqrt(done)
        return 1.0 - done
