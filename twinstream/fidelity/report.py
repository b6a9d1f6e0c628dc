"""A validation as a CSV of its rows, and as a scatter plot in an HTML file."""

import csv
import io
from pathlib import Path

from twinstream.fidelity.validation import Validation
from twinstream.schedule.files import write_text

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
    write_text(text.getvalue(), path)


def write_scatter(validation: Validation, path: Path) -> None:
    """Write predicted against measured speed, and the error by length, as one HTML file.

    Raises:
        DocumentError: the file cannot be written.
    """
    from twinstream.fidelity.scatter import scatter_html  # plotly is slow to import

    write_text(scatter_html(validation), path)
