"""`plan --cluster`: search layouts of a model on the GPUs of a cluster."""

import time
from pathlib import Path
from typing import Any

from twinstream.clusters.predict import planned_document
from twinstream.clusters.search.search import Found, Searched, search, told
from twinstream.commands.arguments.cluster_options import ClusterOptions
from twinstream.commands.arguments.plan_options import PlanOptions
from twinstream.commands.output import print_json, print_report, progress
from twinstream.hardware_profiles.clusters.loader import load_cluster
from twinstream.schedule.files import write_document
from twinstream.screens.layout_screen import layouts_screen


def plan_on_cluster(
    wanted: PlanOptions, asked: ClusterOptions, output: Path | None, *, as_json: bool
) -> None:
    """Find the fastest layouts, show them, write the first one's schedule."""
    job, fixed = asked.job(wanted), asked.fixed(wanted)
    assert asked.cluster is not None and asked.gpus is not None
    cluster = load_cluster(asked.cluster)
    start_s = time.perf_counter()
    with progress(f"laying out {job.shape.name} on {asked.gpus:,} GPUs", quiet=as_json):
        found = search(job, asked.gpus, cluster, fixed, keep=asked.keep)
    seconds = time.perf_counter() - start_s
    try:
        if output is not None:
            best = job.model_copy(update={"layout": found.best[0].layout})
            write_document(planned_document(best, cluster), output)
    finally:
        if as_json:
            print_json(_document(found, seconds))
        else:
            print_report(layouts_screen(job, cluster, asked.gpus, found, seconds))
    if output is not None and not as_json:
        print_report(f"Wrote the schedule of the first to {output}.")


def _document(found: Searched, seconds: float) -> dict[str, Any]:
    return {
        "layouts": [_layout(one) for one in found.best],
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
        "told": told(one.layout),
        "step_s": prediction.step_s,
        "bound_s": one.bound_s,
        "tokens_per_s": prediction.tokens_per_s,
        "mfu": prediction.mfu,
        "memory_bytes": prediction.memory_bytes,
        "memory": dict(prediction.memory),
        "host_bytes": prediction.host_bytes,
        "shares": dict(prediction.shares),
    }
