"""`calibrate --collectives`: what nccl-tests measured, as curves of a cluster's profile."""

from datetime import UTC, datetime
from pathlib import Path

from twinstream.commands.output import print_report, told_at_the_end
from twinstream.hardware_profiles.clusters.loader import load_cluster, save_cluster
from twinstream.hardware_profiles.collectives.fitting import CalibratedCluster, calibrated
from twinstream.hardware_profiles.collectives.reading import chosen, read_points
from twinstream.hardware_profiles.errors import CalibrationError
from twinstream.screens.tables import curves_table


def calibrate_collectives(
    collectives: Path, cluster: str | None, only: list[str], output: Path | None, *, as_json: bool
) -> None:
    """Fit curves to a file of measured collectives, write the profile, tell how good they are.

    Raises:
        CalibrationError: no cluster is given, or a condition is not `gpu_type=NAME`.
        TwinstreamError: as the file and the profile are read.
    """
    if cluster is None:
        raise CalibrationError(
            "--collectives needs --cluster: the profile that the curves are added to, by name "
            "(twinstream clusters) or as a TOML file"
        )
    profile = load_cluster(cluster)
    points = chosen(read_points(collectives), _gpu(only))
    name = output.stem if output else f"{profile.name}_calibrated"
    found = calibrated(profile, points, name, collectives.name, datetime.now(UTC).date())
    with told_at_the_end(
        lambda: _document(found), as_json=as_json, screen=lambda: [curves_table(found.fitted)]
    ):
        if output is not None:
            save_cluster(found.cluster, output)
    if output is not None and not as_json:
        print_report(f"Wrote the profile of cluster '{name}' to {output}.")


def _gpu(only: list[str]) -> str | None:
    if not only:
        return None
    column, _, value = only[0].partition("=")
    if len(only) > 1 or column != "gpu_type" or not value:
        raise CalibrationError(
            f"--only {' '.join(only)}: of collectives one condition can be given, gpu_type=NAME"
        )
    return value


def _document(found: CalibratedCluster) -> dict[str, object]:
    return {
        "cluster": found.cluster.name,
        "curves": [
            one.curve.model_dump(exclude={"lines", "points"})
            | {
                "form": one.curve.form,
                "num_points": one.num_points,
                "error": one.error,
                "left_out_error": one.left_out_error,
            }
            for one in found.fitted
        ],
    }
