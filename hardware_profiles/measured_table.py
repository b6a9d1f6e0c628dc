"""Tables of measured training speeds, as CSV: what `calibrate` and `validate` read.

docs/calibration.md has every column and its unit. The first line that does not begin with `#` names
the columns, in any order; each row is one configuration that was run, or failed. Columns that
`MeasuredRow` does not name are kept as text.
"""

import math
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, ValidationError

from twinstream.hardware_profiles.csv_table import csv_lines, table_text
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.node import Node

NEEDED = ("machine", "model", "seq_len", "host_mem_gib", "dev_mem_gib", "tokens_per_s")
_NUMBERS = (*NEEDED[2:], "step_time_s", "rounds_per_step")
_MOST_FAULTS = 3
_LONGEST_SEQUENCE = 2**30
OUT_OF_MEMORY = ("oom", "out of memory")
RECORDED_POLICY = "ml_dataflow"

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class MeasuredTableError(TwinstreamError):
    """A file is no table of measured speeds; says which line and column, and what is needed."""


class MeasuredRow(Node):
    """One measured configuration.

    `line` is the row's in its file, counted from 1. `policy` planned the run; a table that does not
    say is of the seed system's. `tokens_per_s` is None where the run failed, and `status_detail`
    then says why.
    """

    line: PositiveInt
    machine: str
    model: str
    policy: str = RECORDED_POLICY
    seq_len: Annotated[int, Field(gt=0, le=_LONGEST_SEQUENCE)]
    host_mem_gib: Positive
    dev_mem_gib: Positive
    tokens_per_s: Positive | None = None
    status: Literal["ok", "failed"]
    status_detail: str = ""
    step_time_s: Positive | None = None
    rounds_per_step: PositiveInt | None = None
    rounds_rule: Literal["v1", "v2", ""] = ""
    columns: dict[str, str]

    @property
    def preset(self) -> str:
        """Name of the model's preset."""
        return self.model.lower()

    @property
    def is_ours(self) -> bool:
        """Return whether twinstream ran it, by a policy that `plan` has."""
        return self.policy != RECORDED_POLICY

    @property
    def planned_model(self) -> str:
        """The model, and the policy where it is one of ours: such rows differ by their caps."""
        return f"{self.model} {self.policy}" if self.is_ours else self.model


def read_measured(path: Path) -> tuple[MeasuredRow, ...]:
    """The rows of a table, failed ones included.

    Raises:
        MeasuredTableError: it cannot be read, lacks a needed column, has no rows, or rows that
            are not what they should be.
    """
    names, lines = _read(path, NEEDED)
    found: list[MeasuredRow] = []
    faults: list[str] = []
    for number, values in lines:
        try:
            found.append(_row(number, dict(zip(names, values, strict=False))))
        except ValidationError as error:
            faults.append(f"line {number}, {_reason(error)}")
            continue
        if len(values) < len(names) or any(value.strip() for value in values[len(names) :]):
            faults.append(f"line {number} has {len(values)} values for {len(names)} columns")
    if faults:
        more = len(faults) - _MOST_FAULTS
        shown = "; ".join(faults[:_MOST_FAULTS]) + (f" (and {more} more)" if more > 0 else "")
        raise MeasuredTableError(f"{path} is not a table of measured speeds: {shown}")
    return tuple(found)


def read_cells(path: Path, needed: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """Lines of a list of cells, with their numbers, as the values of their columns.

    Headers, comments and blank lines are read as a measured table's.

    Raises:
        MeasuredTableError: it cannot be read, lacks a needed column, or lists nothing.
    """
    names, lines = _read(path, needed)
    return [
        (number, dict(zip_longest(names, values[: len(names)], fillvalue="")))
        for number, values in lines
    ]


def _read(path: Path, needed: Sequence[str]) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The columns, and the values of each line under them with its number."""
    lines = csv_lines(table_text(path, MeasuredTableError), str(path), MeasuredTableError)
    if not lines:
        raise MeasuredTableError(f"{path} is empty; it needs the columns {', '.join(needed)}")
    names = _names(lines[0][1])
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise MeasuredTableError(f"{path} has the column {twice[0]} twice; leave one out")
    if missing := [name for name in needed if name not in names]:
        raise MeasuredTableError(
            f"{path} has no column {', '.join(missing)}; it needs {', '.join(needed)}, and has "
            f"{', '.join(names)}"
        )
    if not lines[1:]:
        raise MeasuredTableError(f"{path} has no rows under its header")
    return names, lines[1:]


def _names(header: Sequence[str]) -> list[str]:
    """Columns as documented, however they are spaced or capitalised; others as they are."""
    names = [name.strip() for name in header]
    return [name.lower() if name.lower() in MeasuredRow.model_fields else name for name in names]


def _reason(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    column = ".".join(str(place) for place in first["loc"])
    if first["type"] == "missing":
        return f"{column}: there is no value"
    return f"{column}: {first['msg']}, got {first['input']!r}"


def _row(number: int, cells: dict[str, str]) -> MeasuredRow:
    fields = {name: _value(name, text.strip()) for name, text in cells.items() if text.strip()}
    given = (name for name in MeasuredRow.model_fields if name not in ("line", "columns"))
    known = {name: fields.pop(name) for name in given if name in fields}
    known.setdefault("status", "ok" if "tokens_per_s" in known else "failed")
    known["status"] = str(known["status"]).lower()
    if known["status"] in OUT_OF_MEMORY:
        known.setdefault("status_detail", known["status"])
        known["status"] = "failed"
    if known["status"] == "ok":
        known.setdefault("tokens_per_s", "")  # an ok row without a throughput is a fault
    others = {name: text for name, text in cells.items() if name in fields}
    return MeasuredRow.model_validate({**known, "line": number, "columns": others})


def _value(name: str, text: str) -> str | int | float:
    """Numbers as numbers where they are; anything else stays text, for the fault to show."""
    if name not in _NUMBERS:
        return text
    try:
        number = float(text)
    except ValueError:
        return text
    whole = name in ("seq_len", "rounds_per_step") and math.isfinite(number) and number % 1 == 0
    return int(number) if whole else number
