"""`calibrate --steps`: constants of a GPU type from published training steps of clusters."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from twinstream.commands.output import print_report, progress, told_at_the_end
from twinstream.fidelity.cluster_rows import ClusterRow, Values, read_measured_steps
from twinstream.fidelity.constants import with_constants
from twinstream.fidelity.constants_fit import ConstantsFit, fit_constants
from twinstream.fidelity.measured import Predicted, Predictors, predicted
from twinstream.fidelity.report import table_of
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
    with progress("fitting: predictions", quiet=as_json) as step, Predictors(hold=True) as held:

        def predict(asked: Sequence[ClusterRow], values: Sequence[Values]) -> list[Predicted]:
            return held.ask(predicted, list(zip(asked, values, strict=True)), step)

        fit = fit_constants(gpu, rows, predict)
    source = provenance(fit, [table.name for table in tables])
    machine, fitted = with_constants(machine_of(profile), profile, fit.values, source)
    with told_at_the_end(
        fit.model_dump, as_json=as_json, screen=lambda: [constants_table(fit), _told(fit)]
    ):
        if output is not None:
            node = output.with_name(f"{output.stem}_node.toml")
            save_machine(machine.model_copy(update={"name": node.stem}), node)
            changes = {"name": output.stem, "machine": node.name, "machine_changes": {}}
            save_cluster(fitted.model_copy(update=changes), output)
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
    lines = [
        (
            one.name,
            f"{one.value:.4g}",
            f"{one.width:.2g}",
            f"{one.low:g} to {one.high:g}",
            one.meaning + (" (at its bound)" if one.at_bound else ""),
        )
        for one in fit.constants
    ]
    table = table_of(("constant",), ("fitted", "+/-", "bounds"))
    table.add_column("")
    for line in lines:
        table.add_row(*line)
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
