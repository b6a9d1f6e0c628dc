"""What `plan` says of an answer, on the screen or as JSON: one device's, of ranks, of layouts."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.console import RenderableType
from rich.constrain import Constrain

from twinstream.clusters.kernel_sets import why_not_here, why_schedule_not_here
from twinstream.clusters.search.found import RankedLayout, SearchResult
from twinstream.clusters.timed_step import document_of
from twinstream.commands.arguments.price_options import RunOptions
from twinstream.commands.output import print_json, print_report
from twinstream.cost.bill import Bill
from twinstream.hardware_profiles.clusters.published_memory import published_memory
from twinstream.measures.metrics import rate_text
from twinstream.measures.uncertainty import Uncertainty, uncertainty_of_job
from twinstream.measures.wear import wear_notes
from twinstream.models.kernel_costs.attention_limits import nondeterministic_kernels
from twinstream.schedule.analysis.idle import exposed_communication
from twinstream.schedule.document import Schedule
from twinstream.schedule.sizes import gib
from twinstream.schedule.workload import Workload
from twinstream.screens.fitted_table import FittedTable
from twinstream.screens.layout_screen import bills_screen, layouts_screen
from twinstream.screens.plan_screen import WIDTH, plan_notes, plan_screen, recipe_line
from twinstream.screens.ranks_screen import ranks_screen, stages_figures
from twinstream.screens.tables import readable, seconds
from twinstream.study.answer import Answer
from twinstream.study.generation import PlannedGeneration


def tell(
    answer: Answer, seconds: float, known_plan: str | None,
    about: tuple[RunOptions, Sequence[str]], *, as_json: bool,
) -> None:  # fmt: skip
    """The plan of one device, of ranks, or the fastest layouts; and what a run of it costs.

    Args:
        known_plan: the file of a plan that was known, where nothing faster was found.
        about: the prices, and notes about the options.
    """
    charged, notes = about
    if answer.searched is not None:
        _tell_layouts(answer, answer.searched, seconds, charged, as_json=as_json)
        return
    bill = charged.bill(answer.tokens_per_s, answer.num_gpus)
    if as_json:
        found = _ranks_json(answer) if answer.layout else _device_json(answer, known_plan, notes)
        print_json(found | {"plan_seconds": seconds} | ({} if bill is None else {"bill": bill}))
        return
    print_report(*(_ranks_parts if answer.layout else _device_parts)(answer, seconds, notes))
    name = answer.layout_text or f"1 {answer.machine.name}"
    _tell_bills([name], [bill], [answer.uncertainty], charged)
    if known_plan is not None:
        print_report(f"Nothing faster than {known_plan} was found: this is that plan.")
    if answer.assumed:
        print_report(f"Assumed for the prediction: {answer.assumed}.")


def _device_json(answer: Answer, known_plan: str | None, notes: Sequence[str]) -> dict[str, object]:
    schedule, timeline = answer.schedule, answer.timeline
    return {
        **answer.summary.model_dump(),
        **describe(schedule),
        "explanation": answer.explanation,
        "known_plan": known_plan,
        "notes": [*notes, *plan_notes(schedule, answer.machine, timeline)],
        "uncertainty": answer.uncertainty,
    }


def _device_parts(answer: Answer, seconds: float, notes: Sequence[str]) -> list[RenderableType]:
    schedule, timeline, machine = answer.schedule, answer.timeline, answer.machine
    notes = [*notes, *plan_notes(schedule, machine, timeline)]
    return [plan_screen(schedule, timeline, machine, seconds), *narrow(notes)]


def _ranks_json(answer: Answer) -> dict[str, object]:
    schedule = answer.schedule
    return {
        "layout": schedule.layout,
        **_recipe_json(answer.asked.recipe, answer.why_not_here),
        "candidates": [str(one) for one in answer.candidates],
        "bound_s": answer.bound_s,
        "gap": answer.gap,
        "workload": _of_a_replica(answer),
        "stages": stages_figures(schedule),
        "predicted": answer.summary,
        "assumed": answer.assumed or None,
        "notes": _wear(answer),
    }


def _ranks_parts(answer: Answer, seconds: float, _: Sequence[str]) -> list[RenderableType]:
    schedule, why, asked = answer.schedule, answer.why_not_here, answer.asked
    assert answer.cluster is not None, "ranks are linked"
    others = [str(one) for one in answer.candidates if one.layout != answer.layout]
    where = answer.cluster.name
    return [
        ranks_screen(schedule, _of_a_replica(answer), answer.summary, where, seconds),
        recipe_line(asked.spec, asked.recipe, why),
        *_wear(answer),
        *([f"Other layouts: {'; '.join(others)}."] if others else []),
        *([] if answer.gap is None else [_bound_line(answer)]),
    ]


def _wear(answer: Answer) -> list[str]:
    return wear_notes(answer.schedule, answer.machine, answer.summary.step_time_s)


def _bound_line(answer: Answer) -> str:
    return (
        f"The step is {answer.gap:.1%} above {answer.bound_s:.4g} s, which no layout that runs "
        "here can beat."
    )


def _of_a_replica(answer: Answer) -> Workload:
    assert answer.workload is not None and answer.layout is not None
    rounds = answer.workload.rounds_per_step // answer.layout.dp
    return answer.workload.model_copy(update={"rounds_per_step": rounds})


def _tell_layouts(
    answer: Answer, found: SearchResult, seconds: float, charged: RunOptions, *, as_json: bool
) -> None:
    """The fastest layouts of a cluster's GPUs, and what a run costs with each."""
    assert answer.cluster is not None and answer.job is not None
    errors = [
        uncertainty_of_job(one.job, answer.machine, partial(document_of, one.job, answer.cluster))
        for one in found.best
    ]
    bills = [charged.bill(one.prediction.tokens_per_s, answer.num_gpus) for one in found.best]
    if as_json:
        print_json(_layouts_json(found, errors, bills, seconds))
        return
    print_report(layouts_screen(answer.job, answer.cluster, found, errors, seconds))
    _tell_bills([one.layout.text for one in found.best], bills, errors, charged)


def _tell_bills(
    names: Sequence[str], bills: Sequence[Bill | None], errors: Sequence[Uncertainty],
    charged: RunOptions,
) -> None:  # fmt: skip
    charges = [bill for bill in bills if bill is not None]
    if charges:
        means = [error.symmetric for error in errors]
        print_report(bills_screen(names, charges, means, charged.num_tokens))


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
        "memory_errors": {name: one._asdict() for name, one in published_memory()[1].items()},
    }


def _layout_json(one: RankedLayout) -> dict[str, Any]:
    prediction, recipe = one.prediction, one.job.recipe
    exchanged = exposed_communication(prediction.shares)
    return {
        "layout": one.layout.model_dump(mode="json"),
        **_recipe_json(recipe, why_not_here(one.job.shape, recipe, one.layout)),
        "has_kernels": one.job.is_own,
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


def _recipe_json(recipe: object, why_not_here: str | None) -> dict[str, object]:
    """The recipe, and whether that runs on this machine or why not."""
    return {"recipe": recipe, "runs_here": why_not_here is None, "why_not_here": why_not_here}


def narrow(notes: Sequence[str]) -> list[Constrain]:
    """Return notes as wide as the screen above them."""
    return [Constrain(note, WIDTH) for note in notes]


def describe(schedule: Schedule) -> dict[str, object]:
    """Say what one device's schedule is about, for JSON."""
    own = schedule.only
    return {
        "model": own.model.name,
        "machine": schedule.machine.name,
        "policy": schedule.policy,
        "kernels": schedule.recipe.get("kernels"),
        **_recipe_json(schedule.recipe, why_schedule_not_here(own)),
        "nondeterministic": nondeterministic_kernels(own),
        "num_ops": len(own.ops),
        "workload": schedule.workload,
        "caps": schedule.caps,
        "bound": schedule.bound,
    }


def generation_screen(
    found: PlannedGeneration, others: Sequence[PlannedGeneration], plan_seconds: float
) -> list[RenderableType]:
    """How fast text is generated, in what memory, and what limits it; and by other layouts."""
    asked, error, ranks = found.generation, found.uncertainty, found.ranks
    bound = found.bound_s
    table = FittedTable(box=None, show_header=False, width=WIDTH, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    each = "" if ranks.num_gpus == 1 else " of the fullest GPU"
    rows = [
        ("first token", f"after {seconds(found.first_token_s)} ({error.short})"),
        ("then", f"{seconds(found.token_s)} a token of each sequence, "
                 f"{rate_text(found.decode_tokens_per_s)} tokens/s in all"),
        ("altogether", f"{rate_text(found.tokens_per_s)} tokens/s, {seconds(found.seconds)} with "
                       "the prompts"),
        ("memory", f"weights {gib(found.weights_bytes)}, keys and values "
                   f"{gib(found.cache_bytes)}{each}"),
    ]  # fmt: skip
    if ranks.num_gpus > 1:
        assert ranks.cluster is not None
        rows.insert(0, ("layout", f"{ranks.text} on {ranks.cluster.description}"))
    if others:
        texts = [f"{one.ranks.text} {rate_text(one.tokens_per_s)}" for one in others]
        rows.append(("others", f"{', '.join(texts)} tokens/s"))
    if bound:
        gap = f"{found.seconds / bound - 1:.1%} above it"
        rows.append(("lower bound", f"{seconds(bound)} within these caps; all is {gap}"))
    rows.append(("planned in", seconds(plan_seconds)))
    for name, text in rows:
        table.add_row(name, text)
    passes = FittedTable(box=None, width=WIDTH, padding=(0, 2, 0, 0))
    said = ["messages"] if ranks.num_gpus > 1 else []
    for column in ("pass", "time", *said, "device", "host", "H2D", "limited by"):
        passes.add_column(column, justify="left" if column in ("pass", "limited by") else "right")
    for name, one in found.steps:
        limits = ", ".join(map(readable, one.limits)) or "-"
        messages = [seconds(one.communication_s)] * len(said)
        passes.add_row(
            name, seconds(found.pass_s(name, one)), *messages, gib(one.device_bytes),
            gib(one.slowest.host_bytes), gib(one.slowest.summary.h2d_bytes), limits,
        )  # fmt: skip
    gpus = "" if ranks.num_gpus == 1 else f"{ranks.num_gpus:,} x "
    sequences = "sequence" if asked.batch == 1 else "sequences"
    title = (
        f"{found.request.spec.name} generating on {gpus}{found.machine.name}: {asked.batch:,} "
        f"{sequences}, {asked.decode:,} tokens behind {asked.prompt:,}"
    )
    return [title, table, "", passes, f"{error.sentence} No profile was fitted to generating text."]
