"""A calibration's result, as JSON, as tables and as the profile's provenance."""

from datetime import date

from rich.console import Group

from twinstream.fidelity.scoring import table_of
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
            _told(found.observation, "name", "group", "measured_s")
            | _told(found, "before_s", "predicted_s", "left_out_s")
            | _told(found, "before_error", "error", "left_out_error")
            for found in fit.observations
        ],
    }


def parameter_table(fit: Fit) -> Group:
    """The constants that the data tell: prior, fitted value with its spread, bounds; then the names
    of those that stayed at their prior."""
    table = table_of(["parameter"], ["prior", "fitted", "+/-", "rows", "bounds"])
    table.title, table.title_justify = f"Parameters, from {fit.base.name}", "left"
    for found in filter(lambda one: one.identified, fit.parameters):
        at_bound = ", at one" if found.at_bound else ""
        table.add_row(
            found.parameter.name,
            f"{found.prior_value:.4g}",
            f"{found.value:.4g}",
            f"{found.posterior_width:.1%}",
            str(found.num_rows),
            f"{found.parameter.low:g} to {found.parameter.high:g}{at_bound}",
        )
    kept = [found.parameter.name for found in fit.parameters if not found.identified]
    told = f"The data say too little of {', '.join(kept)}: each is near its prior." if kept else ""
    return Group(*([table] if table.row_count else []), *([told] if told else []))


def observation_table(fit: Fit) -> FittedTable:
    """Each measured time: the base's error, the fit's, and without having seen it."""
    lines = [
        (
            found.observation.name,
            f"{found.observation.measured_s:.4g}",
            f"{found.before_error:+.1%}",
            f"{found.error:+.2%}",
            f"{found.left_out_error:+.2%}",
        )
        for found in fit.observations
    ]
    table = table_of(["what"], ["measured s", "base", "fitted", "left out"], lines)
    table.title, table.title_justify = "Measured times", "left"
    errors = fit.summary()
    table.add_section()
    means = (f"{errors.mean_error:.2%}", f"{errors.left_out_mean_error:.2%}")
    table.add_row("mean of absolute", "", "", *means)
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
        **_told(found.parameter, "name", "meaning"),
        "prior": found.prior_value,
        "prior_width": found.parameter.width,
        **_told(found, "value", "posterior_width"),
        "rows": found.num_rows,
        **_told(found.parameter, "low", "high"),
        **_told(found, "identified", "at_bound"),
    }


def _told(found: object, *names: str) -> dict[str, object]:
    return {name: getattr(found, name) for name in names}
