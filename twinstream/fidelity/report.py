"""A validation as a CSV of its rows, and as a scatter plot in an HTML file."""

import csv
import io
from pathlib import Path

from twinstream.fidelity.validation import ValidatedRow, Validation
from twinstream.schedule.files import DocumentError

_COLUMNS = (
    "machine", "model", "seq_len", "host_mem_gib", "dev_mem_gib", "status", "status_detail",
    "rounds_per_step", "tokens_per_s", "predicted_tokens_per_s", "error", "predicted_step_s",
    "stall", "schedule", "refused",
)  # fmt: skip


def write_rows(validation: Validation, path: Path) -> None:
    """Write one line a row of the table, with measured and predicted speed.

    Raises:
        DocumentError: the file cannot be written.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for each in validation.rows:
        values = {**dict(each.row), **dict(each)}
        writer.writerow(["" if values[name] is None else values[name] for name in _COLUMNS])
    _write(path, text.getvalue())


def write_scatter(validation: Validation, path: Path) -> None:
    """Write predicted against measured speed, and the error by length, as one HTML file.

    Raises:
        DocumentError: the file cannot be written.
    """
    from plotly.subplots import make_subplots  # slow to import

    figure = make_subplots(
        rows=1, cols=2, subplot_titles=("predicted and measured tokens/s", "error by length")
    )
    compared = [each for each in validation.rows if each.error is not None]
    groups: dict[str, list[ValidatedRow]] = {}
    for each in compared:
        groups.setdefault(f"{each.row.machine} {each.row.model}", []).append(each)
    colors = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")
    for number, (name, group) in enumerate(groups.items()):
        look = {
            "mode": "markers",
            "name": name,
            "legendgroup": name,
            "marker": {"color": colors[number % len(colors)], "size": 6, "opacity": 0.6},
            "text": [_told(each) for each in group],
            "hovertemplate": "%{text}<extra></extra>",
        }
        measured = [each.row.tokens_per_s for each in group]
        figure.add_scatter(
            x=measured, y=[each.predicted_tokens_per_s for each in group], row=1, col=1, **look
        )
        figure.add_scatter(
            x=[each.row.seq_len for each in group], y=[100 * (each.error or 0.0) for each in group],
            row=1, col=2, showlegend=False, **look,
        )  # fmt: skip
    speeds = [each.row.tokens_per_s for each in compared]
    ends = [min(s for s in speeds if s), max(s for s in speeds if s)]
    figure.add_scatter(
        x=ends, y=ends, mode="lines", name="equal", line={"color": "#888888"}, row=1, col=1
    )
    figure.update_xaxes(type="log", title_text="measured tokens/s", row=1, col=1)
    figure.update_yaxes(type="log", title_text="predicted tokens/s", row=1, col=1)
    figure.update_xaxes(type="log", title_text="tokens of a sequence", row=1, col=2)
    figure.update_yaxes(title_text="predicted / measured - 1, %", row=1, col=2)
    overall = validation.overall
    figure.update_layout(
        title_text=f"{validation.cells} cells, {overall.schedules} schedules: mean error "
        f"{overall.mean_error:.1%}, worst {overall.max_error:.1%}"
    )
    _write(path, figure.to_html(include_plotlyjs=True, full_html=True))


def _told(each: ValidatedRow) -> str:
    row = each.row
    return (
        f"{row.machine} {row.model}, {row.seq_len:,} tokens, {row.host_mem_gib:g} GiB host, "
        f"{row.dev_mem_gib:g} GiB device<br>measured {row.tokens_per_s:,.0f}, predicted "
        f"{each.predicted_tokens_per_s:,.0f} tokens/s ({each.error:+.1%})<br>stall {each.stall:.1%}"
    )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DocumentError(f"cannot write {path}: {error.strerror or error}") from None
