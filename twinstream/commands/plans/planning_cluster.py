"""`plan --cluster`: search layouts of a model on the GPUs of a cluster."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from twinstream.clusters.kernel_sets import why_not_here
from twinstream.clusters.predict import document_of, planned_document
from twinstream.clusters.search.search import Found, Searched
from twinstream.clusters.search.space import told
from twinstream.commands.arguments.cluster_options import ClusterOptions
from twinstream.commands.arguments.plan_options import PlanOptions
from twinstream.commands.arguments.price_options import RunOptions
from twinstream.commands.output import print_json, print_report, progress
from twinstream.cost.bill import Bill
from twinstream.hardware_profiles.clusters.loader import machine_of
from twinstream.measures.uncertainty import Uncertainty, uncertainty_of_job
from twinstream.schedule.analysis.idle import exposed_communication
from twinstream.schedule.files import write_document
from twinstream.screens.layout_screen import bills_screen, layouts_screen


def plan_on_cluster(
    wanted: PlanOptions,
    asked: ClusterOptions,
    charged: RunOptions,
    output: Path | None,
    *,
    as_json: bool,
) -> None:
    """Find the fastest layouts, show them and what a run costs, write the first one's schedule."""
    question = asked.question(wanted)
    job, cluster, num_gpus = question.job, question.cluster, question.num_gpus
    charged.require_possible()
    start_s = time.perf_counter()
    with progress(f"laying out {job.shape.name} on {num_gpus:,} GPUs", quiet=as_json):
        found = question.answer(asked.keep)
    seconds = time.perf_counter() - start_s
    machine = machine_of(cluster)
    errors = [
        uncertainty_of_job(one.job, machine, partial(document_of, one.job, cluster))
        for one in found.best
    ]
    bills = [charged.bill(one.prediction.tokens_per_s, num_gpus) for one in found.best]
    try:
        if output is not None:
            best = found.best[0]
            write_document(best.schedule or planned_document(best.job, cluster), output)
    finally:
        if as_json:
            print_json(_document(found, errors, bills, seconds))
        else:
            print_report(layouts_screen(job, cluster, found, errors, seconds))
            if charged.is_charged:
                print_report(bills_screen(found, bills, charged.num_tokens))
    if output is not None and not as_json:
        print_report(f"Wrote the schedule of the first to {output}.")


def _document(
    found: Searched, errors: Sequence[Uncertainty], bills: Sequence[Bill | None], seconds: float
) -> dict[str, Any]:
    return {
        "layouts": [
            _layout(one) | {"uncertainty": error} | ({} if bill is None else {"bill": bill})
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


def _layout(one: Found) -> dict[str, Any]:
    prediction = one.prediction
    return {
        "layout": one.layout.model_dump(mode="json"),
        "recipe": one.job.recipe.model_dump(mode="json"),
        "has_kernels": one.job.is_own,
        "runs_here": (why := why_not_here(one.job.shape, one.job.recipe, one.layout)) is None,
        "why_not_here": why,
        "told": told(one.layout),
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
            "talk": exposed_communication(prediction.shares),
        },
    }
