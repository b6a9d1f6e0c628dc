"""The rows of a sweep as grids for heatmaps and as curves over a budget."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import nan

import numpy as np
from numpy.typing import NDArray

from twinstream.schedule.sizes import SizeError, gib, parse_bytes
from twinstream.study.sweep.cells import OK
from twinstream.study.sweep.config import SweepConfig
from twinstream.study.values import (
    CLUSTER_NUMBER,
    COLUMNS,
    MACHINE_NUMBER,
    MEMORY_CAPS,
    PRICE,
    Value,
)

Rows = Sequence[Mapping[str, str]]
AXIS_NAMES = {
    "device_mem": "device memory", "host_mem": "host memory", "seq_len": "sequence length",
    "tokens_per_step": "tokens a step", "chunk_tokens": "tokens a chunk",
    "chunks_per_round": "chunks a round", "gpus": "GPUs", "global_batch": "sequences a step",
    "price_per_gpu_hour": "price of a GPU-hour",
}  # fmt: skip

_UNITS = {
    "_bytes_per_s": ("GB/s", 1e9), "_flop_per_s": ("TFLOP/s", 1e12), "_bytes": ("GiB", 2**30),
    "_ns": ("us", 1e3),
}  # fmt: skip

_SPELLED = {
    "pcie": "PCIe", "h2d": "H2D", "d2h": "D2H", "hbm": "HBM", "dram": "DRAM", "nic": "NIC",
    "nics": "NICs", "gpus": "GPUs", "cp": "CP", "dp": "DP", "ep": "EP", "pp": "PP", "tp": "TP",
    "zero": "ZeRO",
}  # fmt: skip


@dataclass(frozen=True)
class Metric:
    """A column of the rows, and how people read it: times `scale`, in `unit`."""

    column: str
    name: str
    scale: float = 1.0
    form: str = ",.0f"


METRICS = (
    Metric("tokens_per_s", "tokens/s"),
    Metric("tokens_per_s_per_gpu", "tokens/s a GPU"),
    Metric("model_tflop_per_s", "model TFLOP/s"),
    Metric("mfu", "MFU, %", 100.0, ".1f"),
    Metric("hfu", "HFU, %", 100.0, ".1f"),
    Metric("step_s", "step, s", form=".4g"),
)
_MONEY = Metric("money_per_billion_tokens", "money a billion tokens", form=",.4g")
_NUM_METRICS = 4


def metrics_of(config: SweepConfig) -> tuple[Metric, ...]:
    """The four that a sweep's figures show."""
    found = [metric for metric in METRICS if metric.column in COLUMNS[config.kind]][:_NUM_METRICS]
    return (*found[:-1], _MONEY if any(n.startswith(PRICE) for n in config.names) else found[-1])


@dataclass(frozen=True)
class Grid:
    """Values over two axes: `levels[metric column]` is [y, x], NaN where there is no plan."""

    title: str
    metrics: tuple[Metric, ...]
    x_name: str
    y_name: str
    x_labels: tuple[str, ...]
    y_labels: tuple[str, ...]
    levels: Mapping[str, NDArray[np.float64]]
    reasons: tuple[tuple[str, ...], ...]

    @property
    def any(self) -> bool:
        """Whether any cell has a plan."""
        return any(np.isfinite(levels).any() for levels in self.levels.values())


@dataclass(frozen=True)
class Curves:
    """Tokens/s over one axis, a line per value of another; `positions` are the axis' numbers."""

    title: str
    x_name: str
    positions: tuple[float, ...]
    labels: tuple[str, ...]
    lines: Mapping[str, tuple[float, ...]]

    @property
    def any(self) -> bool:
        """Whether any point has a plan."""
        return any(np.isfinite(levels).any() for levels in self.lines.values())


def grids(config: SweepConfig, rows: Rows) -> list[Grid]:
    """A grid per combination of the axes that are neither x nor y; none with fewer than two."""
    numeric = _numeric(config)
    if len(numeric) < 2:
        return []
    x, y = numeric[:2]
    metrics = metrics_of(config)
    xs, ys = (_ordered(name, config.axes[name]) for name in (x, y))
    found = []
    for title, chosen in _facets(config, (x, y), rows):
        at = {(row[x], row[y]): row for row in chosen}
        cells = [[at.get((str(u), str(v))) for u in xs] for v in ys]
        levels = {
            metric.column: np.array([[_level(row, metric) for row in line] for line in cells])
            for metric in metrics
        }
        reasons = tuple(tuple(_reason(row) for row in line) for line in cells)
        x_labels, y_labels = (tuple(label(name, v) for v in vs) for name, vs in ((x, xs), (y, ys)))
        names = axis_name(x), axis_name(y)
        found.append(Grid(title, metrics, *names, x_labels, y_labels, levels, reasons))
    return found


def curves(config: SweepConfig, rows: Rows) -> list[Curves]:
    """Curves per combination of the axes that are neither x nor the lines'; none without x."""
    numeric = _numeric(config)
    if not numeric:
        return []
    x = numeric[0]
    others = [name for name in _varied(config) if name not in numeric] + numeric[1:]
    line = others[0] if others else None
    xs = _ordered(x, config.axes[x])
    found = []
    for title, chosen in _facets(config, (x, line) if line else (x,), rows):
        lines: dict[str, tuple[float, ...]] = {}
        for value in _ordered(line, config.axes[line]) if line else ("all",):
            mine = [row for row in chosen if line is None or row[line] == str(value)]
            at = {row[x]: row for row in mine}
            name = f"{axis_name(line)} {label(line, value)}" if line else "tokens/s"
            lines[name] = tuple(_level(at.get(str(u)), METRICS[0]) for u in xs)
        unit, size = _unit(x)
        places = tuple(number(x, value) / size for value in xs)
        x_name = axis_name(x) + (f", {unit}" if unit else "")
        found.append(Curves(title, x_name, places, tuple(label(x, v) for v in xs), lines))
    return found


def axis_name(name: str) -> str:
    """
    >>> axis_name("device_mem"), axis_name("machine.pcie_h2d_bytes_per_s")
    ('device memory', 'PCIe H2D')
    """
    if name in AXIS_NAMES:
        return AXIS_NAMES[name]
    words = name.removeprefix(MACHINE_NUMBER).removeprefix(CLUSTER_NUMBER)
    words = words.removesuffix(_suffix(name)).replace(".", "_")
    return " ".join(_SPELLED.get(word, word) for word in words.split("_"))


def label(name: str, value: Value) -> str:
    """
    >>> label("device_mem", 2**34), label("machine.hbm_bytes_per_s", 3.35e12)
    ('16.00 GiB', '3,350 GB/s')
    """
    if isinstance(value, str | bool):
        return str(value)
    if name in MEMORY_CAPS:
        return gib(value)
    if _suffix(name):
        unit, size = _unit(name)
        return f"{value / size:,g} {unit}"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def number(name: str, value: Value) -> float:
    """The number that a value of an axis stands for; NaN if it is none."""
    if isinstance(value, bool):
        return nan
    if not isinstance(value, str):
        return float(value)
    if name not in MEMORY_CAPS and _suffix(name) != "_bytes":
        return nan
    try:
        return float(parse_bytes(value, whole_bytes=100))
    except SizeError:
        return nan


def _suffix(name: str) -> str:
    return next((suffix for suffix in _UNITS if name.endswith(suffix)), "")


def _unit(name: str) -> tuple[str, float]:
    """In which unit an axis is shown, and its size."""
    return ("GiB", 2**30) if name in MEMORY_CAPS else _UNITS.get(_suffix(name), ("", 1))


def _varied(config: SweepConfig) -> list[str]:
    return [name for name, values in config.axes.items() if len(values) > 1]


def _numeric(config: SweepConfig) -> list[str]:
    """Axes of numbers that vary, memories first."""
    found = [
        name
        for name in _varied(config)
        if not any(np.isnan(number(name, value)) for value in config.axes[name])
    ]
    return sorted(
        found, key=lambda name: MEMORY_CAPS.index(name) if name in MEMORY_CAPS else len(MEMORY_CAPS)
    )


def _ordered(name: str, values: Sequence[Value]) -> list[Value]:
    if any(np.isnan(number(name, value)) for value in values):
        return list(values)
    return sorted(values, key=lambda value: number(name, value))


def _facets(
    config: SweepConfig, used: Sequence[str], rows: Rows
) -> Iterator[tuple[str, list[Mapping[str, str]]]]:
    """(title, rows) of every combination of the axes that are not used."""
    others = [name for name in _varied(config) if name not in used]
    for values in product(*(config.axes[name] for name in others)):
        wanted = {name: str(value) for name, value in zip(others, values, strict=True)}
        chosen = [row for row in rows if all(row[n] == v for n, v in wanted.items())]
        title = ", ".join(
            f"{axis_name(name)} {label(name, value)}"
            for name, value in zip(others, values, strict=True)
        )
        yield title, chosen


def _level(row: Mapping[str, str] | None, metric: Metric) -> float:
    if row is None or row["status"] != OK:
        return nan
    return float(row[metric.column]) * metric.scale


def _reason(row: Mapping[str, str] | None) -> str:
    if row is None:
        return "not run"
    return "" if row["status"] == OK else f"{row['status']}: {row['reason']}"
