"""Lines of a table of measured speeds as rows: of the seed system, or planned by ours."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from twinstream.fidelity.cells import Cell, CellKey, cell_of, key_of
from twinstream.fidelity.measured import Predicted
from twinstream.fidelity.own_rows import OwnCell, OwnKey, own_cell, own_key
from twinstream.fidelity.seed_system.sizing import SizingRefused, UnsuitableModel
from twinstream.hardware_profiles.measured_table import MeasuredRow
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.presets import UnknownModelError
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.schedule.errors import TwinstreamError

RowKey = CellKey | OwnKey


@dataclass(frozen=True)
class TableRow:
    """A line of a table of measured speeds, predicted on the profile of its machine."""

    line: MeasuredRow

    @property
    def identity(self) -> int:
        """Return the identity of the line."""
        return id(self.line)

    @property
    def measured(self) -> float | None:
        """Return the measured tokens/s; None where the run failed."""
        return self.line.tokens_per_s if self.line.status == "ok" else None

    @property
    def effort(self) -> float:
        """Return the length of a sequence: chunks, and so ops, grow with it."""
        return self.line.seq_len

    def value_in(self, predicted: Predicted) -> float | None:
        """Return the predicted tokens/s."""
        return predicted.tokens_per_s

    def key(self) -> RowKey:
        """Return what decides the schedule; raises as `key_of` and `own_key`."""
        return own_key(self.line) if self.line.is_ours else key_of(self.line)

    def ready(self, profile: Machine) -> Cell | OwnCell:
        """Make the schedule; one of ours is planned for the machine. Raises as they do."""
        return own_cell(self.line, profile) if self.line.is_ours else cell_of(self.line)

    def refusal(self, error: TwinstreamError) -> str | None:
        """Return the cap that a plan of ours exceeds, as the tables call it."""
        if not isinstance(error, InfeasiblePlan):
            return None
        return "failed_dev_mem" if error.shortage.cap == "device" else "failed_host_mem"


@dataclass(frozen=True)
class Known:
    """What is known of lines before any prediction, by their numbers.

    `unpredicted` are those that the seed system refuses and those beyond what is known here.
    """

    keys: Mapping[int, RowKey]
    unpredicted: Mapping[int, Predicted]

    @property
    def unknown(self) -> dict[str, int]:
        """Count the lines that are beyond what is known, by the reason."""
        return dict(Counter(each.unknown for each in self.unpredicted.values() if each.unknown))

    @property
    def nothing_left(self) -> str:
        """Say that no row is left to predict, and why."""
        why = "".join(f"; {count} rows: {reason}" for reason, count in self.unknown.items())
        return (
            f"no row of the table both ran and can be planned, so there is nothing to compare{why}"
        )


def known_of(rows: Iterable[MeasuredRow], on_row: Callable[[], None] = lambda: None) -> Known:
    """Find what decides each row's schedule, or why the seed system refuses it.

    Whether our planner would is only known by planning. `on_row` is called after each.
    """
    keys: dict[int, RowKey] = {}
    unpredicted: dict[int, Predicted] = {}
    for row in rows:
        try:
            keys[row.line] = TableRow(row).key()
        except SizingRefused as error:
            unpredicted[row.line] = Predicted(refused=error.reason)
        except (UnknownModelError, UnsuitableModel) as error:
            unpredicted[row.line] = Predicted(unknown=str(error))
        on_row()
    return Known(keys, unpredicted)
