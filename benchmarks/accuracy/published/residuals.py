"""Write how far each published step is predicted off, by what is near to what: for error bars.

python -m benchmarks.accuracy.published.residuals steps.csv rows.csv --source "..." -o OUT.csv

`steps.csv` is what `python -m benchmarks.accuracy.published` wrote, `rows.csv` what `twinstream
validate --cluster steps.csv -o rows.csv` said of it. Only rows count that no
constant was fitted to.
"""

import argparse
import csv
import io
from collections.abc import Sequence
from pathlib import Path

from twinstream.fidelity.cluster_rows import read_measured_steps
from twinstream.measures.published_steps import COLUMNS, StepKind


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--source", required=True, help="the page, its date and commit")
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args(arguments)
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
    text = io.StringIO()
    text.write(f"# {source}\n")
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in read_measured_steps([steps]):
        error = errors.get((row.series, row.row_id))
        if error is None or row.job is None:
            continue
        cells = StepKind.of(row.job).cells()
        cells |= {"cluster": row.cluster, "gpu": row.gpu}
        told = {"series": row.series, "family": row.family, "error": f"{error:.4f}"}
        writer.writerow(cells | told)
    return text.getvalue()


if __name__ == "__main__":
    main()
