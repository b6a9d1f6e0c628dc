r"""Write how far each published step is predicted off, by what is near to what: for error bars.

python -m benchmarks.accuracy.published.residuals steps.csv rows.csv --source "..." -o OUT.csv \
    --memory MEMORY.csv

`steps.csv` is what `python -m benchmarks.accuracy.published` wrote, `rows.csv` what `twinstream
validate --cluster steps.csv -o rows.csv` said of it. Only rows count that no
constant was fitted to. MEMORY.csv has the predicted bytes of runs whose recompute is stated.
"""

import argparse
import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from twinstream.fidelity.cluster_rows import read_measured_steps
from twinstream.hardware_profiles.clusters.published_memory import COLUMNS as MEMORY_COLUMNS
from twinstream.measures.published_steps import COLUMNS, StepKind


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--source", required=True, help="the page, its date and commit")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--memory", type=Path)
    given = parser.parse_args(arguments)
    if given.memory is not None:
        told = memory_csv(given.steps, given.rows, given.source)
        given.memory.write_text(told, encoding="utf-8")
    text = residuals_csv(given.steps, given.rows, given.source)
    given.output.write_text(text, encoding="utf-8")
    print(f"Wrote {text.count(chr(10)) - 2} steps to {given.output}.")


def residuals_csv(steps: Path, rows: Path, source: str) -> str:
    """The table: a line for its source, one for the columns, one a step, in the table's order."""
    with rows.open(encoding="utf-8", newline="") as file:
        errors = {
            (line["series"], line["row"]): float(line["error"])
            for line in csv.DictReader(file)
            if line["split"] == "scored" and line["error"]
        }
    told = []
    for row in read_measured_steps([steps]):
        error = errors.get((row.series, row.row_id))
        if error is None or row.job is None:
            continue
        cells = StepKind.of(row.job).cells()
        cells |= {"cluster": row.cluster, "gpu": row.gpu}
        cells |= {"series": row.series, "family": row.family, "error": f"{error:.4f}"}
        told.append(cells)
    return _csv(source, COLUMNS, told)


def memory_csv(steps: Path, rows: Path, source: str) -> str:
    """The table of predicted, present and reserved bytes of a GPU, in the steps' order."""
    with rows.open(encoding="utf-8", newline="") as file:
        predicted = {
            (line["series"], line["row"]): (line["memory_bytes"], line["room_bytes"])
            for line in csv.DictReader(file)
            if line["memory_bytes"]
        }
    told = []
    for row in read_measured_steps([steps]):
        bytes_of = predicted.get((row.series, row.row_id))
        if bytes_of is None or not (row.recompute_stated or row.reserved_bytes):
            continue
        cells = {"framework": row.framework, "series": row.series}
        cells |= {"predicted_bytes": bytes_of[0], "room_bytes": bytes_of[1]}
        told.append(cells | {"reserved_bytes": str(row.reserved_bytes or "")})
    return _csv(source, MEMORY_COLUMNS, told)


def _csv(source: str, columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> str:
    text = io.StringIO()
    text.write(f"# {source}\n")
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


if __name__ == "__main__":
    main()
