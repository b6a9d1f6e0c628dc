"""Measured collectives, from a CSV or from what nccl-tests printed.

The text of nccl-tests has runs one after the other, each with its devices and a table of sizes:

# Collective test starting: all_reduce_perf
#  Rank  0 RankGroup  0 Pid  1887 on  worker-1 device  0 [0x8d] NVIDIA H100 80GB HBM3
#                                                   out-of-place                in-place
#       size   count   type  redop  root   time  algbw  busbw #wrong   time  algbw  busbw #wrong
#        (B)  (elements)                   (us)  (GB/s) (GB/s)         (us) (GB/s) (GB/s)
     1048576  262144  float    sum    -1  27.76  37.78  66.11      0  27.49  38.15  66.76      0
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from twinstream.hardware_profiles.clusters.curves import COLLECTIVES, Collective
from twinstream.hardware_profiles.csv_table import csv_lines, table_text
from twinstream.hardware_profiles.errors import CollectiveTableError
from twinstream.hardware_profiles.profile_files import Text
from twinstream.schedule.errors import did_you_mean
from twinstream.schedule.node import Node
from twinstream.schedule.numbers import PositiveCount, PositiveSize

_ALSO_CALLED: dict[str, Collective] = {
    "allreduce": "all_reduce",
    "reducescatter": "reduce_scatter",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "sendrecv": "send_recv",
}
_TimeUs = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]


class CollectivePoint(Node):
    """The time of one collective of one size; `in_place_us` where that was measured too.

    `size_bytes` is nccl-tests' size: the larger of what a rank gives and what it receives.
    """

    gpu: str
    collective: Collective
    ranks: PositiveCount
    ranks_per_node: PositiveCount
    dtype: Text | None
    size_bytes: PositiveSize
    time_us: _TimeUs
    in_place_us: _TimeUs | None = None


def collective_named(name: str, where: str) -> Collective:
    """The collective of a name, as nccl-tests calls it too (`alltoall`, `sendrecv`).

    >>> collective_named("AllToAll", "here")
    'all_to_all'

    Raises:
        CollectiveTableError: there is none.
    """
    plain = name.strip().lower().replace("-", "_")
    for known in COLLECTIVES:
        if plain == known:
            return known
    if plain in _ALSO_CALLED:
        return _ALSO_CALLED[plain]
    hint = did_you_mean(plain, COLLECTIVES) or f"known: {', '.join(COLLECTIVES)}"
    raise CollectiveTableError(f"{where}: unknown collective '{name.strip()}': {hint}")


def chosen(points: Iterable[CollectivePoint], gpu: str | None) -> tuple[CollectivePoint, ...]:
    """The points of one kind of GPU; without a name there must be only one.

    Raises:
        CollectiveTableError: there are several, or none of that name.
    """
    points = tuple(points)
    kinds = sorted({point.gpu for point in points})
    if gpu is None and len(kinds) <= 1:
        return points
    found = [kind for kind in kinds if gpu is not None and kind.lower() == gpu.lower()]
    if not found:
        problem = "there are several kinds of GPU" if gpu is None else f"no rows are of '{gpu}'"
        raise CollectiveTableError(
            f'{problem}; say which: --only "gpu_type=...", one of {", ".join(kinds)}'
        )
    return tuple(point for point in points if point.gpu == found[0])


_PERF = re.compile(r"\b([a-z_]+?)_perf(?:_mpi)?\b")
_RANK = re.compile(r"#\s+Rank\s+\d+\s.*?\bon\s+(\S+)\s+device\s+\d+\s+\[[^]]*\]\s+(.*\S)")
_COLUMNS = re.compile(r"#\s+size\s+count\s+type\b.*")
_NEEDED = ("size", "count", "type", "redop", "time", "algbw", "busbw")
_MOST_US = 1e12
_CLOSE = 0.1  # of the ratio of bus to algorithm bandwidth, which is printed with two digits


@dataclass
class _Run:
    """One table, and what the lines before it say."""

    name: str | None = None
    hosts: Counter[str] = field(default_factory=Counter)
    gpu: str = ""
    columns: list[str] = field(default_factory=list)
    rows: list[tuple[str, list[str]]] = field(default_factory=list)  # where, values


def is_nccl_text(text: str) -> bool:
    """Return whether there is a header of nccl-tests' table."""
    return any(_COLUMNS.match(line.strip()) for line in text.splitlines())


def nccl_points(text: str, name: str) -> tuple[CollectivePoint, ...]:
    """The points of all runs in a text; sizes of 0 bytes are left out.

    Which collective it is: the line "Collective test starting", a command in the text or the file's
    name (`all_gather_perf.txt`); where none says so, what the columns tell: an all-reduce's bus
    bandwidth is 2 (n - 1) / n of its algorithm bandwidth, a reduce-scatter's (n - 1) / n with an
    operation.

    Raises:
        CollectiveTableError: columns are missing, values are wrong, results were wrong (#wrong), or
            devices or the collective are not told.
    """
    points = [point for run in _runs(text, name) for point in _points_of(run)]
    if not points:
        raise CollectiveTableError(f"{name} has no rows under the header of nccl-tests")
    return tuple(points)


def _runs(text: str, name: str) -> list[_Run]:
    named = _PERF.search(name)
    runs = [_Run(named[1] if named else None)]
    for number, line in enumerate(text.splitlines(), 1):
        where, plain, run = f"{name}, line {number}", line.strip(), runs[-1]
        perf = _PERF.search(plain)
        if run.rows and (perf or (plain.startswith("#") and "nThread" in plain)):
            runs.append(run := _Run(run.name))
        if perf:
            run.name = perf[1]
        elif rank := _RANK.match(plain):
            run.hosts[rank[1]] += 1
            run.gpu = rank[2]
        elif _COLUMNS.match(plain):
            run.columns = plain.lstrip("# ").split()
            if missing := [column for column in _NEEDED if column not in run.columns]:
                raise CollectiveTableError(f"{where}: no column {', '.join(missing)}")
        elif run.columns and re.match(r"\d", plain):
            run.rows.append((where, plain.split()))
    return runs


def _points_of(run: _Run) -> list[CollectivePoint]:
    if not run.rows:
        return []
    first = run.rows[0][0]
    if not run.hosts:
        raise CollectiveTableError(
            f"{first}: no line '# Rank 0 ... on HOST device ...' before it says how many ranks"
        )
    ranks, per_node = run.hosts.total(), max(run.hosts.values())
    if ranks != per_node * len(run.hosts) or ranks < 2:
        raise CollectiveTableError(
            f"{first}: {ranks} ranks on {len(run.hosts)} hosts, "
            f"{', '.join(f'{count} on {host}' for host, count in sorted(run.hosts.items()))}; "
            "collectives are priced for two ranks or more, equally many on each node"
        )
    rows = [_Row.of(run.columns, values, where) for where, values in run.rows]
    collective = _collective(run, max(rows, key=lambda row: row.algbw), ranks)
    return [
        CollectivePoint(
            gpu=run.gpu, collective=collective, ranks=ranks, ranks_per_node=per_node,
            dtype=row.dtype, size_bytes=row.size_bytes, time_us=row.time_us,
            in_place_us=row.in_place_us,
        )
        for row in rows
        if row.size_bytes
    ]  # fmt: skip


@dataclass(frozen=True)
class _Row:
    where: str
    size_bytes: int
    dtype: str
    redop: str
    time_us: float
    in_place_us: float | None
    algbw: float
    busbw: float

    @classmethod
    def of(cls, columns: list[str], values: list[str], where: str) -> "_Row":
        if len(values) != len(columns):
            raise CollectiveTableError(
                f"{where}: {len(values)} values for the {len(columns)} columns {' '.join(columns)}"
            )
        out = {name: values[columns.index(name)] for name in columns}
        in_place = dict(zip(columns, values, strict=True))  # of names that repeat, the last
        _require_right(out, in_place, where)
        try:
            twice = columns.count("time") > 1
            row = cls(
                where, int(out["size"]), out["type"], out["redop"], float(out["time"]),
                _or_none(in_place["time"]) if twice else None,
                float(out["algbw"]), float(out["busbw"]),
            )  # fmt: skip
        except ValueError as error:
            raise CollectiveTableError(f"{where}: {error}") from None
        times = [row.time_us, row.in_place_us or row.time_us]
        if not all(0 < time_us < _MOST_US for time_us in times) or row.size_bytes < 0:
            raise CollectiveTableError(f"{where}: {row.size_bytes} bytes in {row.time_us} us")
        return row


def _require_right(out: dict[str, str], cells: dict[str, str], where: str) -> None:
    for values in (out, cells):
        if (wrong := values.get("#wrong", "0")) not in ("0", "N/A"):
            raise CollectiveTableError(
                f"{where}: #wrong is {wrong}: the collective gave wrong results, so its time is "
                "worth nothing"
            )


def _collective(run: _Run, row: _Row, ranks: int) -> Collective:
    """Return which collective a run was; `row` is the one whose bandwidths have most digits."""
    if run.name is not None:
        return collective_named(run.name, row.where)
    scatters = (ranks - 1) / ranks
    if row.redop != "none" and row.algbw > 1:
        if abs(row.busbw / row.algbw / (2 * scatters) - 1) < _CLOSE:
            return "all_reduce"
        if abs(row.busbw / row.algbw / scatters - 1) < _CLOSE:
            return "reduce_scatter"
    raise CollectiveTableError(
        f"{row.where}: nothing says which collective this is; call the file after it "
        "(all_gather_perf.txt), or keep the line 'Collective test starting'"
    )


def _or_none(text: str) -> float | None:
    return None if text == "N/A" else float(text)


_IN_CSV = ("n", "collective", "bytes", "time_us")


def csv_points(text: str, name: str) -> tuple[CollectivePoint, ...]:
    """The points of a CSV: columns n (ranks), collective, bytes, time_us; `#` begins a comment.

    Columns gpu_type, dtype and ranks_per_node (all of n without it) may be there, and others.

    Raises:
        CollectiveTableError: a column is missing, a row is not what it should be, or there is none.
    """
    lines = csv_lines(text, name, CollectiveTableError)
    header = [cell.strip().lower() for cell in lines[0][1]] if lines else []
    if missing := [column for column in _IN_CSV if column not in header]:
        raise CollectiveTableError(
            f"{name} has no column {', '.join(missing)}; it needs {', '.join(_IN_CSV)}, and has "
            f"{', '.join(header)}; text of nccl-tests is known by its line of size, count, type"
        )
    points = [
        _csv_point(dict(zip(header, cells, strict=False)), f"{name}, line {number}")
        for number, cells in lines[1:]
    ]
    if not points:
        raise CollectiveTableError(f"{name} has no rows under its header")
    return tuple(points)


def _csv_point(cells: dict[str, str], where: str) -> CollectivePoint:
    try:
        ranks = _whole(cells.get("n", ""))
        return CollectivePoint(
            gpu=cells.get("gpu_type", "").strip(),
            collective=collective_named(cells.get("collective", ""), where),
            ranks=ranks,
            ranks_per_node=_whole(cells.get("ranks_per_node", "").strip() or str(ranks)),
            dtype=cells.get("dtype", "").strip() or None,
            size_bytes=_whole(cells.get("bytes", "")),
            time_us=float(cells.get("time_us", "")),
        )
    except ValueError as error:  # of pydantic, too
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False)[0]
            problem = f"{first['loc'][0]}: {first['msg']}, got {first['input']!r}"
        else:
            problem = str(error)
        raise CollectiveTableError(f"{where}: {problem}") from None


def _whole(text: str) -> int:
    number = float(text)
    if number % 1:
        raise ValueError(f"{text} is no whole number")
    return int(number)


def read_points(path: Path) -> tuple[CollectivePoint, ...]:
    """The points of a CSV or of the text that nccl-tests prints; which of both, its content says.

    Raises:
        CollectiveTableError: it cannot be read, is neither, or holds nothing.
    """
    text = table_text(path, CollectiveTableError)
    if not text.strip():
        raise CollectiveTableError(
            f"{path} is empty; give what nccl-tests printed, or a CSV with the columns "
            f"{', '.join(_IN_CSV)}"
        )
    return nccl_points(text, path.name) if is_nccl_text(text) else csv_points(text, path.name)
