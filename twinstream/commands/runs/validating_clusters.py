"""`validate --cluster`: how far predicted steps of clusters are from published ones."""

from collections.abc import Sequence
from pathlib import Path

from twinstream.commands.output import print_json, print_report, progress
from twinstream.fidelity.clusters.measured_steps import read_measured_steps
from twinstream.fidelity.clusters.predicting import RowPredictors
from twinstream.fidelity.clusters.report import rows_csv, validation_json, validation_screen
from twinstream.fidelity.clusters.scoring import score
from twinstream.schedule.files import write_text


def validate_clusters(
    tables: Sequence[Path], jobs: int | None, output: Path | None, *, as_json: bool
) -> None:
    """Predict every row of published tables, print errors, scaling, ratios and what fits.

    Raises:
        ClusterTableError: a file is none of the known tables.
        NothingScoredError: no row can be predicted.
    """
    rows = read_measured_steps(tables)
    with (
        progress(f"predicting {len(rows)} rows", len(rows), quiet=as_json) as step,
        RowPredictors(jobs, step) as predictors,
    ):
        predicted = predictors.predicted(rows, [None] * len(rows))
    validation = score(rows, predicted)
    try:
        if output is not None:
            write_text(rows_csv(validation), output)
    finally:  # what was found is told, on a full disk too
        if as_json:
            print_json(validation_json(validation))
        else:
            print_report(validation_screen(validation))
    if output is not None and not as_json:
        print_report(f"Wrote {output}.")
