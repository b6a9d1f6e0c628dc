"""Measured collectives in a CSV, one point a row."""

import csv
import io

from pydantic import ValidationError

from twinstream.hardware_profiles.collectives.points import CollectivePoint, collective_named
from twinstream.hardware_profiles.errors import CollectiveTableError

NEEDED = ("n", "collective", "bytes", "time_us")


def csv_points(text: str, name: str) -> tuple[CollectivePoint, ...]:
    """The points of a CSV: columns n (ranks), collective, bytes, time_us; `#` begins a comment.

    Columns gpu_type, dtype and ranks_per_node (all of n without it) may be there, and others.

    Raises:
        CollectiveTableError: a column is missing, a row is not what it should be, or there is none.
    """
    lines = [
        (number, line)
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.startswith("#")
    ]
    rows = csv.reader(io.StringIO("\n".join(line for _, line in lines)))
    header = [cell.strip().lower() for cell in next(rows, [])]
    if missing := [column for column in NEEDED if column not in header]:
        raise CollectiveTableError(
            f"{name} has no column {', '.join(missing)}; it needs {', '.join(NEEDED)}, and has "
            f"{', '.join(header)}; text of nccl-tests is known by its line of size, count, type"
        )
    points = [
        _point(dict(zip(header, cells, strict=False)), f"{name}, line {number}")
        for (number, _), cells in zip(lines[1:], rows, strict=False)
    ]
    if not points:
        raise CollectiveTableError(f"{name} has no rows under its header")
    return tuple(points)


def _point(cells: dict[str, str], where: str) -> CollectivePoint:
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
