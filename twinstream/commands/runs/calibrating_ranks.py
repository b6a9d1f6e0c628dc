"""`calibrate` on a run of ranks: a cluster's profile of this machine and its processes."""

from datetime import UTC, datetime
from pathlib import Path

from twinstream.commands.arguments.inputs import read_timeline
from twinstream.commands.output import print_json, print_report, progress
from twinstream.fidelity.fit_report import fit_json, observation_table, parameter_table
from twinstream.fidelity.ranks_fit import fit_ranks
from twinstream.hardware_profiles.clusters.curves import CollectiveCurve
from twinstream.hardware_profiles.clusters.loader import save_with_node
from twinstream.hardware_profiles.errors import CalibrationError
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.document import Schedule
from twinstream.schedule.timeline import require_timeline_of


def calibrate_ranks(
    base: Machine,
    document: Schedule,
    timeline: Path,
    output: Path | None,
    *,
    anyway: bool,
    as_json: bool,
) -> None:
    """Fit the profile; write it, and beside it that of a node, NAME_node.toml.

    Args:
        anyway: write it even where the base predicts the kernels better.

    Raises:
        CalibrationError: the name is no TOML file's, or too little was measured.
        TwinstreamError: as the files are read.
    """
    if output is not None and output.suffix != ".toml":
        raise CalibrationError(f"name the profile {output.stem}.toml: it names its node's file")
    name = output.stem if output else "ranks"
    told = f"{timeline.name} on {datetime.now(UTC).date().isoformat()}"
    with progress(f"fitting to {timeline}", quiet=as_json):
        measured = read_timeline(timeline, "measured", "--timeline")
        require_timeline_of(document, measured)
        found = fit_ranks(base, [(document, measured)], name, told)
    try:
        if output is not None:
            if not anyway:
                found.kernels.require_no_worse()
            save_with_node(found.cluster, found.machine, output)
    finally:  # what was fitted is told, on a full disk too
        if as_json:
            print_json(fit_json(found.kernels) | {"curves": found.cluster.curves})
        else:
            print_report(parameter_table(found.kernels), observation_table(found.kernels))
            print_report(f"{found.cluster.description}.", *map(_curve_told, found.cluster.curves))
    if output is not None and not as_json:
        print_report(f"Wrote the profile to {output}; use it as --cluster {output}.")


def _curve_told(curve: CollectiveCurve) -> str:
    points = ", ".join(f"{size:,.0f} bytes {ns / 1e3:,.0f} us" for size, ns in curve.points)
    return f"{curve.collective.replace('_', '-')} of {curve.ranks} ranks: {points}"
