"""What a calibration found, as JSON, as tables and as the profile's provenance."""

from datetime import date

from rich import box
from rich.console import Group

from twinstream.hardware_profiles.calibration.fitting import Fit, FittedParameter
from twinstream.hardware_profiles.calibration.search import FAR
from twinstream.screens.fitted_table import FittedTable

_MOST_NAMED = 5


def provenance(fit: Fit, measured: str, today: date) -> str:
    """One sentence for the profile: what it was fitted to, when, and how well that went."""
    errors = fit.summary()
    return (
        f"fitted to {len(fit.observations)} measured times of {measured} on {today.isoformat()}, "
        f"mean residual {errors.mean_error:.2%}, "
        f"each schedule left out {errors.left_out_mean_error:.2%}"
    )


def fit_json(fit: Fit) -> dict[str, object]:
    """Errors (absolute fractions), parameters and observations."""
    return {
        "base": fit.base.name,
        **vars(fit.summary()),
        "num_predictions": fit.num_predictions,
        "unexplained": [found.observation.name for found in fit.unexplained()],
        "parameters": [_parameter_json(found) for found in fit.parameters],
        "observations": [
            {
                "name": found.observation.name,
                "group": found.observation.group,
                "measured_s": found.observation.measured_s,
                "before_s": found.before_s,
                "predicted_s": found.predicted_s,
                "left_out_s": found.left_out_s,
                "before_error": found.before_error,
                "error": found.error,
                "left_out_error": found.left_out_error,
            }
            for found in fit.observations
        ],
    }


def parameter_table(fit: Fit) -> Group:
    """The constants that the data tell: prior, fitted value with its spread, bounds; then the names
    of those that stayed at their prior."""
    table = FittedTable(
        title=f"Parameters, from {fit.base.name}", title_justify="left", box=box.SIMPLE_HEAD
    )
    for column in ("parameter", "prior", "fitted", "+/-", "rows", "bounds"):
        table.add_column(column, justify="left" if column == "parameter" else "right")
    for found in fit.parameters:
        low, high = found.parameter.low, found.parameter.high
        at_bound = ", at one" if found.at_bound else ""
        if not found.identified:
            continue
        table.add_row(
            found.parameter.name,
            f"{found.prior_value:.4g}",
            f"{found.value:.4g}",
            f"{found.posterior_width:.1%}",
            str(found.num_rows),
            f"{low:g} to {high:g}{at_bound}",
        )
    kept = [found.parameter.name for found in fit.parameters if not found.identified]
    told = f"The data say too little of {', '.join(kept)}: each is near its prior." if kept else ""
    return Group(*([table] if table.row_count else []), *([told] if told else []))


def observation_table(fit: Fit) -> FittedTable:
    """Each measured time: the base's error, the fit's, and without having seen it."""
    table = FittedTable(title="Measured times", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("what")
    for column in ("measured s", "base", "fitted", "left out"):
        table.add_column(column, justify="right")
    for found in fit.observations:
        table.add_row(
            found.observation.name,
            f"{found.observation.measured_s:.4g}",
            f"{found.before_error:+.1%}",
            f"{found.error:+.2%}",
            f"{found.left_out_error:+.2%}",
        )
    errors = fit.summary()
    table.add_section()
    table.add_row("mean of absolute", "", "", f"{errors.mean_error:.2%}",
                  f"{errors.left_out_mean_error:.2%}")  # fmt: skip
    table.add_row("largest", "", "", f"{errors.max_error:.2%}", f"{errors.left_out_max_error:.2%}")
    return table


def ending(fit: Fit) -> str:
    """One sentence on what is left: noise, or the rows that are further off."""
    far = fit.unexplained()
    errors = fit.summary()
    if not far:
        return (
            f"The fit ends at the noise: {errors.mean_error:.2%} on average, "
            f"{errors.max_error:.2%} at most."
        )
    named = "; ".join(f"{one.observation.name} {one.error:+.1%}" for one in far[:_MOST_NAMED])
    more = f" and {len(far) - _MOST_NAMED} more" if len(far) > _MOST_NAMED else ""
    return (
        f"The fit does not end at the noise: it is off by {errors.mean_error:.2%} on average, and "
        f"{len(far)} of {len(fit.observations)} measured times stay off by over {FAR:.0%}: "
        f"{named}{more}. Check how they were measured."
    )


def _parameter_json(found: FittedParameter) -> dict[str, object]:
    return {
        "name": found.parameter.name,
        "meaning": found.parameter.meaning,
        "prior": found.prior_value,
        "prior_width": found.parameter.width,
        "value": found.value,
        "posterior_width": found.posterior_width,
        "rows": found.num_rows,
        "low": found.parameter.low,
        "high": found.parameter.high,
        "identified": found.identified,
        "at_bound": found.at_bound,
    }
