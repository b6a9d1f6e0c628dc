"""Predicted times of measured ones at points of a search, asked for in batches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Profile = TypeVar("Profile")


@dataclass(frozen=True)
class TimeQuery(Generic[Profile]):
    """A question to the predictor: how long observation `index` takes on this profile."""

    profile: Profile
    index: int


# Seconds, in the order of the questions.
Predictor = Callable[[Sequence[TimeQuery[Profile]]], Sequence[float]]


class Trials(Generic[Profile]):
    """Predictions of `count` observations at points of a search; `profile_of` is a point's profile.

    `num_predictions` counts what the predictor was asked.
    """

    def __init__(
        self, count: int, profile_of: Callable[[Vector], Profile], predict: Predictor[Profile]
    ) -> None:
        self._count, self._profile_of, self._predict = count, profile_of, predict
        self._known: dict[bytes, Vector] = {}
        self.num_predictions = 0

    def times_s(self, point: Vector) -> Vector:
        """Return the seconds of each observation at a point, which is asked for once."""
        key = point.tobytes()
        if key not in self._known:
            self._known[key] = self.ask([point])[0]
        return self._known[key]

    def ask(self, points: Sequence[Vector]) -> list[Vector]:
        """Return the seconds of each observation at each point."""
        profiles = map(self._profile_of, points)
        times = self._times([TimeQuery(p, i) for p in profiles for i in range(self._count)])
        return list(times.reshape(len(points), self._count))

    def times_at_s(self, points: Sequence[Vector]) -> Vector:
        """Return the seconds of each observation at a point of its own."""
        profiles = {point.tobytes(): self._profile_of(point) for point in points}
        return self._times([TimeQuery(profiles[p.tobytes()], i) for i, p in enumerate(points)])

    def slopes(self, point: Vector, steps: Mapping[int, float]) -> Vector:
        """Return [observations, columns] of how much the log times change with each coordinate.

        Args:
            steps: of each coordinate that moves; the others' columns are 0.
        """
        moved = []
        for column, step in steps.items():
            moved.append(point.copy())
            moved[-1][column] += step
        here, there = np.log(self.times_s(point)), self.ask(moved)
        slopes = np.zeros((self._count, len(point)))
        for (column, step), times in zip(steps.items(), there, strict=True):
            slopes[:, column] = (np.log(times) - here) / step
        return slopes

    def _times(self, trials: Sequence[TimeQuery[Profile]]) -> Vector:
        self.num_predictions += len(trials)
        return np.array(self._predict(trials))
