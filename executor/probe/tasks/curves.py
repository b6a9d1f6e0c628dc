"""Fit efficiency curves to measured kernels, whole tasks and single units together.

Each unit of work is priced as the cost model does: FLOPs and FLOPs over the depth of the inner loop
for matmul and attention, of attention those under the causal mask once more, bytes for the rest,
and launches. That is linear in a few
non-negative coefficients, so that the times of tasks made of many units, and of units alone, are
one least-squares problem of relative errors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from twinstream.executor.probe.tasks.task_samples import TaskSample
from twinstream.hardware_profiles.cost import diagonal_flops, inner_depth
from twinstream.hardware_profiles.curve_choice import efficiency_keys
from twinstream.hardware_profiles.schema import Efficiency, is_compute_unit
from twinstream.schedule.cost import Work

# Of a vector unit's rate, which without samples that tell stays near the copy's, and of what the
# triangle of a causal mask costs more, which then is nothing.
_PRIOR_WEIGHT = 0.05
_WEAK_PRIOR_WEIGHT = 0.005  # of a compute unit's, where depth and rate are measured at one depth
_MOST_EFFICIENT = 1.5  # no curve may have more
_ROBUST_FROM = 0.05
_REWEIGHTINGS = 8
_VECTOR_LAUNCH = "vector launch"
# Attention's fixed part is its depth's where a kernel is one launch.
_STARTS = ("matmul", "grouped_matmul", "grouped_matmul_gradient")
_ATTENTION = ("attention_forward", "attention_backward")


@dataclass(frozen=True)
class Ceilings:
    """Rates per second that the curves are fractions of, and ns of a launch priced apart."""

    flop_per_s: float
    hbm_bytes_per_s: float
    copy_bytes_per_s: float
    launch_ns: float


@dataclass(frozen=True)
class CurveFit:
    """Curves by efficiency key, and measured over fitted time of each sample."""

    curves: dict[str, Efficiency]
    ratios: dict[str, float]

    @property
    def worst_residual(self) -> float:
        return max((abs(ratio - 1.0) for ratio in self.ratios.values()), default=0.0)


def fit_curves(
    samples: Sequence[TaskSample],
    ceilings: Ceilings,
    source: str,
    *,
    attention_starts: bool = False,
) -> CurveFit:
    """Curves that give the samples' times best, by relative error.

    With `attention_starts` a call of attention has a fixed cost beside its depth's: many small
    ops a tile, as on a CPU.
    """
    terms_of = partial(_terms, starts=_STARTS + (_ATTENTION if attention_starts else ()))
    columns = sorted({name for sample in samples for name in terms_of(sample.works)})
    index = {name: i for i, name in enumerate(columns)}
    rows, goals = [], []
    for sample in samples:
        launches_ns = ceilings.launch_ns * sum(work.launches for work in sample.works)
        row = _row(terms_of(sample.works), index)
        rows.append(row / sample.time_ns)
        goals.append(max(0.0, 1.0 - launches_ns / sample.time_ns))
    priors = {
        "bytes": (_PRIOR_WEIGHT, ceilings.copy_bytes_per_s),
        "flops": (_WEAK_PRIOR_WEIGHT, ceilings.flop_per_s),
        "diagonal": (_PRIOR_WEIGHT, ceilings.flop_per_s),
    }
    for name in columns:
        if (kind := name.split()[0]) in priors:
            weight, per_s = priors[kind]
            row = np.zeros(len(columns))
            row[index[name]] = weight * per_s / 1e9
            rows.append(row)
            goals.append(0.0 if kind == "diagonal" else weight)
    solved = _solve_robustly(np.array(rows), np.array(goals))
    found = dict(zip(columns, solved, strict=True))
    predicted = [
        _ns(terms_of(s.works), found) + ceilings.launch_ns * sum(w.launches for w in s.works)
        for s in samples
    ]
    ratios = {s.name: s.time_ns / ns for s, ns in zip(samples, predicted, strict=True) if ns}
    return CurveFit(_curves(samples, found, ceilings, source), ratios)


def _terms(works: Sequence[Work], starts: tuple[str, ...]) -> dict[str, float]:
    """Amounts by the coefficient, in ns per unit of amount, that they are times.

    Launches of the units in `starts` cost something by themselves.
    """
    terms: dict[str, float] = {}
    for work in works:
        key = curve_key(work)
        amounts: dict[str, float] = {}
        if is_compute_unit(work.unit):
            amounts[f"flops {key}"] = work.flops
            if depth := inner_depth(work):
                amounts[f"depth {key}"] = work.flops / depth
            if triangle := diagonal_flops(work):
                amounts[f"diagonal {key}"] = triangle
            if work.unit in starts:
                amounts[f"launches {key}"] = work.launches
        else:
            amounts[f"bytes {key}"] = work.hbm_bytes
            amounts[_VECTOR_LAUNCH] = work.launches
        for name, amount in amounts.items():
            terms[name] = terms.get(name, 0.0) + amount
    return terms


def curve_key(work: Work) -> str:
    """The efficiency key that a work's curve is written under, the most specific there is."""
    return efficiency_keys(work)[0]


def _row(terms: Mapping[str, float], index: Mapping[str, int]) -> NDArray[np.float64]:
    row = np.zeros(len(index))
    for name, amount in terms.items():
        row[index[name]] = amount
    return row


def _solve_robustly(rows: NDArray[np.float64], goals: NDArray[np.float64]) -> NDArray[np.float64]:
    """Residuals beyond `_ROBUST_FROM` pull less than in proportion: a disturbed sample is one."""
    found = _solve(rows, goals)
    for _ in range(_REWEIGHTINGS):
        residuals = np.abs(rows @ found - goals)
        weights = np.sqrt(np.minimum(1.0, _ROBUST_FROM / np.maximum(residuals, 1e-12)))
        found = _solve(rows * weights[:, None], goals * weights)
    return found


def _solve(rows: NDArray[np.float64], goals: NDArray[np.float64]) -> NDArray[np.float64]:
    """Non-negative least squares; columns are scaled so that none is lost to rounding."""
    scale = np.linalg.norm(rows, axis=0)
    scale[scale == 0.0] = 1.0
    found: NDArray[np.float64] = nnls(rows / scale, goals)[0] / scale
    return found


def _ns(terms: Mapping[str, float], found: Mapping[str, float]) -> float:
    return sum(found[name] * amount for name, amount in terms.items())


def _curves(
    samples: Sequence[TaskSample], found: Mapping[str, float], ceilings: Ceilings, source: str
) -> dict[str, Efficiency]:
    curves = {}
    for work in {curve_key(w): w for sample in samples for w in sample.works}.values():
        key = curve_key(work)
        compute = is_compute_unit(work.unit)
        nominal_per_ns = (ceilings.flop_per_s if compute else ceilings.hbm_bytes_per_s) / 1e9
        slope = found[f"{'flops' if compute else 'bytes'} {key}"]
        launch_ns = found.get(f"launches {key}", 0.0) if compute else found[_VECTOR_LAUNCH]
        maximum = min(_MOST_EFFICIENT, 1.0 / (nominal_per_ns * slope) if slope else _MOST_EFFICIENT)
        depth_slope = found.get(f"depth {key}", 0.0)
        curves[key] = Efficiency(
            max=maximum,
            half=launch_ns * nominal_per_ns * maximum,
            half_depth=depth_slope * nominal_per_ns * maximum,
            diagonal=found.get(f"diagonal {key}", 0.0) * nominal_per_ns * maximum,
            of="flops" if compute else "bytes",
            kind="measured",
            source=source,
        )
    return curves
