"""Memory over time as few points as a screen shows, without losing a peak."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twinstream.report.view import Span, View
from twinstream.schedule.analysis.occupancy import MemorySample, memory_over_time
from twinstream.schedule.tensors import Tier

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes by role from each of `start_ns` on, at the fullest moment until the next."""

    start_ns: Floats
    bytes_by_role: dict[str, Floats]


def memory_samples(view: View, tier: Tier) -> list[MemorySample]:
    return memory_over_time(view.schedule, view.timeline.passes[-1], tier)


def memory_curve(samples: list[MemorySample], span: Span, num_points: int) -> MemoryCurve:
    """The samples of a span in equal intervals, each at the moment when most bytes are alive."""
    edges = np.linspace(span.start_ns, span.end_ns, num_points + 1)
    moments = np.asarray([sample.start_ns for sample in samples], np.float64)
    totals = np.asarray([sample.total_bytes for sample in samples])
    names = list(dict.fromkeys(role for sample in samples for role in sample.bytes_by_role))
    curves = {str(name): np.zeros(num_points + 1) for name in names}
    # The level at an interval's start is that of the last change before it.
    first = np.maximum(np.searchsorted(moments, edges, side="right") - 1, 0)
    for number, low in enumerate(first):
        high = first[number + 1] + 1 if number + 1 < len(first) else low + 1
        if not samples:
            break
        fullest = int(low + np.argmax(totals[low:high]))
        for role, size_bytes in samples[fullest].bytes_by_role.items():
            curves[role][number] = size_bytes
    return MemoryCurve(edges, curves)
