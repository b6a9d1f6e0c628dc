"""What notebooks show and take apart: data frames of any result, figures of a step."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import ArgumentError
from twinstream.schedule.timeline import Timeline, TimelineMismatch, require_timeline_of


class HasRecords(Protocol):
    """A schedule, a timeline, an answer, or what `fit`, `sweep` and `search_layouts` return."""

    def records(self) -> list[dict[str, object]]:
        """Its rows."""


def frame(found: HasRecords, beside: HasRecords | None = None) -> Any:
    """The rows of a result as a pandas data frame: ops, spans, cells or layouts.

    Args:
        beside: another with the same ops, whose columns are added: `frame(schedule, timeline)`.

    Raises:
        ArgumentError: pandas is not installed, or it has no rows to show.
        TimelineMismatch: the timeline is of another schedule.
    """
    if find_spec("pandas") is None:
        raise ArgumentError("a frame needs pandas, which is not installed: pip install pandas")
    import pandas as pd

    for one in (found, beside):
        if one is not None and not hasattr(one, "records"):
            raise ArgumentError(
                f"a {type(one).__name__} has no rows: give a schedule, a timeline, an answer, or "
                "what fit, sweep or search_layouts returned"
            )
    rows = pd.DataFrame(found.records())
    if beside is None:
        return rows
    columns = pd.DataFrame(beside.records())
    ops, others = list(rows.get("op_id", ())), list(columns.get("op_id", ()))
    if not ops or ops != others:
        raise TimelineMismatch(
            f"the second has {len(others)} ops that are not the first's {len(ops)} in its order; "
            "give a schedule and a timeline of it"
        )
    return rows.merge(columns, on="op_id", validate="one_to_one")


def figure(schedule: Schedule, timeline: Timeline, machine: str | Path | Machine) -> Any:
    """Streams, memory and links of a step, as `write_report` draws them; a plotly figure.

    Raises:
        TwinstreamError: there is no such machine, or the timeline is of another schedule.
    """
    # plotly takes long to import
    from twinstream.report.bars import merged_bars
    from twinstream.report.timeline_figure import Shown, timeline_figure
    from twinstream.report.view import view_of

    require_timeline_of(schedule, timeline)
    view = view_of(timeline.provenance.kind, schedule, timeline)
    shown = [Shown(view, view.whole, merged_bars(view))]
    return timeline_figure(shown, load_machine(machine))
