"""What `plan` says of an answer, on the screen or as JSON: one device's, of ranks, of layouts."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.constrain import Constrain

from twinstream.clusters.kernel_sets import recipe_text, why_not_here, why_schedule_not_here
from twinstream.clusters.predict import document_of
from twinstream.clusters.search.search import RankedLayout, SearchResult
from twinstream.commands.arguments.price_options import RunOptions
from twinstream.commands.output import print_json, print_report
from twinstream.cost.bill import Bill
from twinstream.hardware_profiles.clusters.loader import machine_of
from twinstream.measures.uncertainty import Uncertainty, uncertainty_of_job
from twinstream.models.kernel_costs.attention_limits import nondeterministic_kernels
from twinstream.schedule.analysis.idle import exposed_communication
from twinstream.schedule.document import Schedule
from twinstream.screens.layout_screen import bills_screen, layouts_screen
from twinstream.screens.plan_screen import WIDTH, plan_notes, plan_screen
from twinstream.screens.ranks_screen import ranks_screen, stages_figures
from twinstream.study.many_gpus import LaidOutStep
from twinstream.study.planned_step import PlannedStep
from twinstream.study.several_ranks import RanksStep


def tell_device(
    answer: PlannedStep, seconds: float, known_plan: str | None,
    about: tuple[RunOptions, Sequence[str]], *, as_json: bool,
) -> None:  # fmt: skip
    """One device's plan, and what a run of it costs.

    Args:
        known_plan: the file of a plan that was known, where nothing faster was found.
        about: the prices, and notes about the options.
    """
    machine, schedule, timeline = answer.machine, answer.schedule, answer.timeline
    charged, notes = about
    notes = [*notes, *plan_notes(schedule, machine, timeline)]
    bill = charged.bill(answer.tokens_per_s, num_gpus=1)
    if as_json:
        more: dict[str, object] = {} if bill is None else {"bill": bill}
        more |= {
            "explanation": answer.explanation,
            "known_plan": known_plan,
            "notes": notes,
            "uncertainty": answer.uncertainty,
        }
        summary = answer.summary.model_copy(update={"plan_seconds": seconds})
        print_json(summary.model_dump() | describe(schedule) | more)
        return
    print_report(plan_screen(schedule, timeline, machine, seconds), *narrow(notes))
    if bill is not None:
        print_report(
            bills_screen(
                [f"1 {machine.name}"], [bill], [answer.uncertainty.mean], charged.num_tokens
            )
        )
    if known_plan is not None:
        print_report(f"Nothing faster than {known_plan} was found: this is that plan.")


def tell_ranks(answer: RanksStep, seconds: float, charged: RunOptions, *, as_json: bool) -> None:
    """The layout of ranks that was chosen, and the others."""
    schedule, place, chosen, summary = answer.schedule, answer.place, answer.chosen, answer.summary
    bill = charged.bill(summary.tokens_per_s, schedule.mesh.size)
    rounds = chosen.workload.rounds_per_step // chosen.layout.dp
    workload = chosen.workload.model_copy(update={"rounds_per_step": rounds})
    why = answer.why_not_here
    if as_json:
        shown = {
            "layout": schedule.layout,
            "recipe": answer.recipe,
            "runs_here": why is None,
            "why_not_here": why,
            "candidates": [str(one) for one in chosen.candidates],
            "workload": workload,
            "stages": stages_figures(schedule),
            "predicted": summary,
            "assumed": place.assumed or None,
            "plan_seconds": seconds,
        }
        print_json(shown if bill is None else shown | {"bill": bill})
        return
    print_report(ranks_screen(schedule, workload, summary, place.cluster.name, seconds))
    others = [str(one) for one in chosen.candidates if one.layout != chosen.layout]
    runs = "Runs here" if why is None else f"Does not run here: {why}"
    print_report(f"Recipe: {recipe_text(answer.spec, answer.recipe)}. {runs}.")
    if others:
        print_report(f"Other layouts: {'; '.join(others)}.")
    if bill is not None:
        print_report(
            bills_screen(
                [chosen.layout.text], [bill], [answer.uncertainty.mean], charged.num_tokens
            )
        )
    if place.assumed:
        print_report(f"Assumed for the prediction: {place.assumed}.")


def tell_layouts(
    answer: LaidOutStep, seconds: float, charged: RunOptions, *, as_json: bool
) -> None:
    """The fastest layouts of a cluster's GPUs, and what a run costs with each."""
    found, cluster, job = answer.searched, answer.cluster, answer.job
    assert found is not None, "all layouts were searched"
    machine = machine_of(cluster)
    errors = [
        uncertainty_of_job(one.job, machine, partial(document_of, one.job, cluster))
        for one in found.best
    ]
    bills = [charged.bill(one.prediction.tokens_per_s, answer.num_gpus) for one in found.best]
    if as_json:
        print_json(_layouts_json(found, errors, bills, seconds))
        return
    print_report(layouts_screen(job, cluster, found, errors, seconds))
    if charged.is_charged:
        names = [one.layout.text for one in found.best]
        charges = [bill for bill in bills if bill is not None]
        print_report(
            bills_screen(names, charges, [error.mean for error in errors], charged.num_tokens)
        )


def _layouts_json(
    found: SearchResult, errors: Sequence[Uncertainty], bills: Sequence[Bill | None], seconds: float
) -> dict[str, Any]:
    return {
        "layouts": [
            _layout_json(one) | {"uncertainty": error} | ({} if bill is None else {"bill": bill})
            for one, error, bill in zip(found.best, errors, bills, strict=True)
        ],
        "uncertainty": errors[0],
        "least_bound_s": found.least_bound_s,
        "gap": found.gap,
        "num_layouts": found.num_layouts,
        "num_fit": found.num_fit,
        "num_simulated": found.num_simulated,
        "seconds": seconds,
    }


def _layout_json(one: RankedLayout) -> dict[str, Any]:
    prediction = one.prediction
    exchanged = exposed_communication(prediction.shares)
    return {
        "layout": one.layout.model_dump(mode="json"),
        "recipe": one.job.recipe.model_dump(mode="json"),
        "has_kernels": one.job.is_own,
        "runs_here": (why := why_not_here(one.job.shape, one.job.recipe, one.layout)) is None,
        "why_not_here": why,
        "layout_text": one.layout.text,
        "step_s": prediction.step_s,
        "bound_s": one.bound_s,
        "tokens_per_s": prediction.tokens_per_s,
        "mfu": prediction.mfu,
        "memory_bytes": prediction.memory_bytes,
        "memory": dict(prediction.memory),
        "host_bytes": prediction.host_bytes,
        "shares": {
            "bubble": 0.0,
            **prediction.shares,
            "communication": exchanged,
            "talk": exchanged,  # its name in earlier versions, which scripts may read
        },
    }


def narrow(notes: Sequence[str]) -> list[Constrain]:
    """As wide as the screen above them."""
    return [Constrain(note, WIDTH) for note in notes]


def describe(schedule: Schedule) -> dict[str, object]:
    """Say what one device's schedule is about, for JSON."""
    own = schedule.only
    return {
        "model": own.model.name,
        "machine": schedule.machine.name,
        "policy": schedule.policy,
        "kernels": schedule.recipe.get("kernels"),
        "recipe": schedule.recipe,
        "runs_here": (why := why_schedule_not_here(own)) is None,
        "why_not_here": why,
        "nondeterministic": nondeterministic_kernels(own),
        "num_ops": len(own.ops),
        "workload": schedule.workload,
        "caps": schedule.caps,
        "bound": schedule.bound,
    }
