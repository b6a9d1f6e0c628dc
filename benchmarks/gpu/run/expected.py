"""What jobs should take, from what they took on an H200 (docs/benchmarks/nvidia-h200.json)."""

from benchmarks.gpu.jobs.campaign import Backend

# A probe of 152 samples, each after 0.5 s of load, took 117 s, of which some 11 were for links,
# latencies and the sustained rate.
_LINKS_S, _SAMPLE_S = 11.0, (117.0 - 11.0) / 152 - 0.5
PIN_S = 25.0  # of 100 GiB, where a new process has to do it again: 21 s
CHECK_S = 30.0
CHOOSE_S: dict[Backend, float] = {"cpu": 5.0, "cuda": 45.0}  # 41 s of 8b's shapes
_TRAIN_S, _TINY_TRAIN_S = 85.0, 20.0
_TINY_PROBE_S = 8.0


def train_s(*, is_tiny: bool) -> float:
    """Of `twinstream train`."""
    return _TINY_TRAIN_S if is_tiny else _TRAIN_S


def probe_s(num_samples: int, load_s: float, *, is_tiny: bool) -> float:
    """Of a probe that takes so many samples, each after so much load.

    >>> round(probe_s(152, 0.5, is_tiny=False)), round(probe_s(100, 0.2, is_tiny=False))
    (117, 51)
    """
    return _TINY_PROBE_S if is_tiny else _LINKS_S + num_samples * (_SAMPLE_S + load_s)
