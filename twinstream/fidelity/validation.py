"""Every row of a measured table predicted, and how far off the predictions are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twinstream.fidelity.measured import Predicted
from twinstream.fidelity.rows import profiles_of
from twinstream.fidelity.scoring import Key, ScoredRow, score
from twinstream.fidelity.table_rows import Known, TableRow, known_of
from twinstream.hardware_profiles.measured_table import OUT_OF_MEMORY, MeasuredRow
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.errors import TwinstreamError

STALLED = 0.10
ScoredLine = ScoredRow[TableRow]
Starts = Callable[[str, int], Callable[[], None]]


class ValidationError(TwinstreamError):
    """Nothing of a table can be predicted with the profiles given."""


@dataclass(frozen=True)
class TableValidation:
    """All rows of a table that have a profile, in its order, with their predictions.

    `left_out` rows are of machines that no profile was given for, `without_rows` are profiles given
    whose machine has none.
    """

    rows: tuple[ScoredLine, ...]
    left_out: int
    without_rows: tuple[str, ...] = ()

    @property
    def compared(self) -> list[ScoredLine]:
        """Return the rows with an error."""
        return [each for each in self.rows if each.error is not None]

    @property
    def stalled(self) -> list[ScoredLine]:
        """Return those predicted over 10 % slower than with infinite links."""
        return [each for each in self.compared if (each.predicted.stall or 0.0) > STALLED]

    @property
    def failed(self) -> list[ScoredLine]:
        """Return the rows of runs that failed."""
        return [each for each in self.rows if each.row.line.status == "failed"]

    @property
    def refused_alike(self) -> int:
        """Count the failed rows that are refused for the reason that the table gives, or for want
        of memory where it gives that."""
        return sum(
            bool(each.predicted.refused)
            and (
                each.predicted.refused == each.row.line.status_detail
                or each.row.line.status_detail.lower() in OUT_OF_MEMORY
            )
            for each in self.failed
        )

    @property
    def refused(self) -> list[ScoredLine]:
        """Return the rows that ran, but that the policy refuses: nothing is predicted of them."""
        ran = (each for each in self.rows if each.row.line.status == "ok")
        return [each for each in ran if each.predicted.refused]

    @property
    def unknown(self) -> dict[str, int]:
        """Count the rows of models that nobody here knows, by the reason."""
        unpredicted = {each.row.line.line: each.predicted for each in self.rows}
        return Known({}, unpredicted).unknown


def validate(
    rows: Sequence[MeasuredRow],
    machines: Sequence[Machine],
    *,
    jobs: int | None = None,
    on_start: Starts = lambda what, total: lambda: None,
) -> TableValidation:
    """Predict the rows of a table with the profiles of their machines.

    Args:
        rows: of `read_measured`.
        machines: profiles; each is used for the rows of the machine whose class its name begins
            with, see `profiles_of`.
        jobs: processes; by default as many as there are cores.
        on_start: is told what begins and of how many parts (sizing rows, then predicting distinct
            schedules), and returns what to call after each.

    Raises:
        ValidationError: no row is of any of the machines, or none could be run.
        TwinstreamError: a row's machine or model is not known, or a profile lacks a number.
    """
    names = sorted({row.machine for row in rows})
    profiles = profiles_of(names, machines)
    if not profiles:
        given = ", ".join(machine.name for machine in machines)
        raise ValidationError(
            f"the table has rows of {', '.join(names)}, the profiles given are {given}: give the "
            "profile of one of the table's machines with --machine"
        )
    mine = [row for row in rows if row.machine in profiles]
    known = known_of(mine, on_start("sizing", len(mine)))
    if not any(row.status == "ok" and row.line in known.keys for row in mine):
        raise ValidationError(known.nothing_left)
    scored = score(
        [TableRow(row) for row in mine],
        [_key(row, known) for row in mine],
        lambda row: profiles[row.line.machine],
        jobs=jobs,
        on_start=lambda total: on_start("predicting", total),
    )
    without = [machine.name for machine in machines if machine not in profiles.values()]
    return TableValidation(scored, len(rows) - len(mine), tuple(without))


def _key(row: MeasuredRow, known: Known) -> Key | Predicted:
    """A failed run of the seed system's is not predicted: its sizing has told all."""
    key = known.keys.get(row.line)
    if key is None:
        return known.unpredicted[row.line]
    return Key(key, key.plan) if row.status == "ok" or row.is_ours else Predicted()
