"""`calibrate --steps`: constants of a GPU type from published training steps of clusters."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich import box

from twinstream.commands.output import print_json, print_report, progress
from twinstream.fidelity.clusters.constants import with_constants
from twinstream.fidelity.clusters.fitting import ConstantsFit, fit_constants
from twinstream.fidelity.clusters.measured_steps import read_measured_steps
from twinstream.fidelity.clusters.predicting import RowPredictors
from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of, save_cluster
from twinstream.hardware_profiles.errors import CalibrationError
from twinstream.hardware_profiles.loader import save_machine
from twinstream.screens.fitted_table import FittedTable


def calibrate_steps(
    tables: Sequence[Path], cluster: str | None, gpu: str | None, output: Path | None,
    *, as_json: bool,
) -> None:  # fmt: skip
    """Fit the constants of a GPU type, write the cluster and its node, tell how good they are.

    The cluster goes to `output`, the node's machine beside it, as NAME_node.toml.

    Raises:
        CalibrationError: no cluster or GPU type is given, or no row is for it.
        TwinstreamError: as tables and profiles are read.
    """
    if cluster is None or gpu is None:
        raise CalibrationError(
            "--steps needs --cluster, the profile that gets the constants (twinstream clusters), "
            "and --only gpu=NAME, the GPU type of the tables that it has: A100, H100"
        )
    profile = load_cluster(cluster)
    rows = read_measured_steps(tables)
    with (
        progress("fitting: predictions", quiet=as_json) as step,
        RowPredictors(None, step, hold=True) as pool,
    ):
        fit = fit_constants(gpu, rows, pool.predicted)
    source = provenance(fit, [table.name for table in tables])
    machine, fitted = with_constants(machine_of(profile), profile, fit.values, source)
    try:
        if output is not None:
            node = output.with_name(f"{output.stem}_node.toml")
            save_machine(machine.model_copy(update={"name": node.stem}), node)
            changes = {"name": output.stem, "machine": node.name, "machine_changes": {}}
            save_cluster(fitted.model_copy(update=changes), output)
    finally:  # what was fitted is told, on a full disk too
        if as_json:
            print_json(fit.model_dump())
        else:
            print_report(constants_table(fit), _told(fit))
    if output is not None and not as_json:
        print_report(f"Wrote the cluster to {output}, and its node beside it.")


def provenance(fit: ConstantsFit, tables: Sequence[str]) -> str:
    """One sentence for the profiles: what the constants were fitted to, when, how well it went."""
    return (
        f"fitted to {fit.rows} steps of {', '.join(tables)} on {datetime.now(UTC).date()}, mean "
        f"error {fit.mean_error:.1%} of them, bias {fit.bias:+.1%}"
    )


def constants_table(fit: ConstantsFit) -> FittedTable:
    """Each constant: value with its spread, bounds, meaning."""
    table = FittedTable(box=box.SIMPLE_HEAD)
    table.add_column("constant")
    for name in ("fitted", "+/-", "bounds"):
        table.add_column(name, justify="right")
    table.add_column("")
    for one in fit.constants:
        bound = " (at its bound)" if one.at_bound else ""
        numbers = (f"{one.value:.4g}", f"{one.width:.2g}", f"{one.low:g} to {one.high:g}")
        table.add_row(one.name, *numbers, one.meaning + bound)
    return table


def _told(fit: ConstantsFit) -> str:
    told = (
        f"{fit.rows} rows of {fit.families} configurations: mean error {fit.mean_error:.1%}, bias "
        f"{fit.bias:+.1%}; {fit.start_mean_error:.1%} at the start. {fit.num_predictions} "
        "predictions."
    )
    if fit.left_out:
        told += f" {len(fit.left_out)} cannot be predicted, first {fit.left_out[0]}."
    return told
