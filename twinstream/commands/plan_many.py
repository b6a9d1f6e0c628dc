"""`plan` of several devices: layouts of a cluster searched, or those that ranks run planned."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, get_args

from twinstream.clusters.choosing import ChosenLayout, RanksQuestion, rank_caps, workloads_of_ranks
from twinstream.clusters.kernel_sets import recipe_refusal, recipe_text, why_not_here
from twinstream.clusters.layout import LayoutError
from twinstream.clusters.predict import document_of, planned_document
from twinstream.clusters.search.question import KEPT
from twinstream.clusters.search.search import RankedLayout, SearchResult
from twinstream.clusters.search.space import told
from twinstream.clusters.shared_machine import Place, cores_here, place_here
from twinstream.commands.arguments.cluster_options import ClusterOptions, RanksOptions
from twinstream.commands.arguments.plan_options import PlanOptions
from twinstream.commands.arguments.price_options import RunOptions
from twinstream.commands.arguments.requests import request_of, require_known
from twinstream.commands.output import print_json, print_report, progress
from twinstream.cost.bill import Bill
from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.metrics import Summary, summarize
from twinstream.measures.uncertainty import Uncertainty, uncertainty_of_job
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.planner.choices import RECOMPUTE_LEVELS, recompute_word
from twinstream.planner.planner import gc_paused
from twinstream.planner.request import PlanRequest
from twinstream.schedule.analysis.idle import exposed_communication
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
from twinstream.schedule.files import write_document
from twinstream.schedule.ops import Reduction
from twinstream.schedule.workload import MachineRef
from twinstream.screens.layout_screen import bills_screen, layouts_screen
from twinstream.screens.ranks_screen import ranks_screen, stages_figures

_NOT_OF_RANKS = ("--policy", "--prefetch", "--effort", "--optimizer-overhead")
_PIPELINES = ("gpipe", "1f1b", "interleaved", "ring")


@dataclass(frozen=True)
class PlannedRanks:
    """The layout that was chosen, the place where it is predicted, and the seconds it took."""

    spec: ModelSpec
    recipe: Recipe
    chosen: ChosenLayout
    place: Place
    schedule: ClusterSchedule
    seconds: float

    def summary(self) -> Summary:
        """What is predicted."""
        return summarize(self.schedule, self.chosen.predicted, self.place.machine)


def plan_for_ranks(
    num_ranks: int,
    wanted: PlanOptions,
    asked: ClusterOptions,
    charged: RunOptions,
    output: Path | None,
    *,
    as_json: bool,
) -> None:
    """Plan every stage within the caps of a rank, and write the schedule that ranks run.

    Raises:
        LayoutError: an option is not of ranks that run here, or they cannot be laid out so.
        TwinstreamError: an option is missing, unknown, or cannot be read.
    """
    if asked.gpus not in (None, num_ranks):
        raise LayoutError(f"--ranks {num_ranks} and --gpus {asked.gpus} both count: leave out one")
    if beside := _not_of_ranks(asked):
        raise _refusal(beside)
    charged.require_possible()
    wanted = asked.of_devices(wanted)
    found = planned_for_ranks(num_ranks, wanted, asked, asked.cluster, quiet=as_json)
    try:
        if output is not None:
            write_document(found.schedule, output)
    finally:
        _tell(found, found.summary(), charged, as_json=as_json)
    if output is not None and not as_json:
        print_report(f"Wrote the schedule to {output}; run it: twinstream run {output}")


def planned_for_ranks(
    num_ranks: int, wanted: PlanOptions, asked: RanksOptions, where: str | None, *, quiet: bool
) -> PlannedRanks:
    """The fastest layout that so many ranks run, each stage planned within the caps of a rank.

    Args:
        where: a cluster, whose nodes are planned for unless a machine is given; without one the
            ranks are on one machine, whose links are assumed.

    Raises:
        LayoutError: an option is not of ranks that run here, or they cannot be laid out so.
        TwinstreamError: an option is missing, unknown, or cannot be read.
    """
    fixed = _fixed(asked, wanted)
    if beside := [flag for flag in wanted.given() if flag in _NOT_OF_RANKS]:
        raise _refusal(beside)
    request, place = _request(wanted, where, num_ranks)
    if (why := recipe_refusal(request.recipe)) is not None:
        raise LayoutError(f"ranks cannot run this: {why}")
    workloads = workloads_of_ranks(request.decoder, request.step, request.machine, num_ranks)
    on_node = min(place.cluster.count("gpus_per_node"), num_ranks)
    question = RanksQuestion(
        request.decoder, request.recipe, workloads, num_ranks, fixed, place.cluster, place.machine,
        rank_caps(request.machine, on_node, wanted.device_mem, wanted.host_mem),
        request.choices,
    )  # fmt: skip
    start_s = time.perf_counter()
    with progress(f"planning {num_ranks} ranks", quiet=quiet), gc_paused():
        chosen = question.answer()
    seconds = time.perf_counter() - start_s
    schedule = chosen.schedule
    if where is not None:
        made_for = MachineRef(name=place.cluster.name, content_hash=place.cluster.name)
        schedule = schedule.model_copy(update={"machine": made_for})
    return PlannedRanks(request.decoder, request.recipe, chosen, place, schedule, seconds)


def _request(wanted: PlanOptions, where: str | None, num_ranks: int) -> tuple[PlanRequest, Place]:
    """For one rank: the machine given, else a node of the cluster; and where all ranks are."""
    cluster = None if where is None else load_cluster(where)
    machine: Machine | None = None
    if wanted.machine is None:
        if cluster is None:
            raise LayoutError("--ranks needs --machine (of one rank), or --cluster with its nodes")
        machine = machine_of(cluster)
    request = request_of(wanted, machine)
    if cluster is not None:
        return request, Place(cluster, request.machine)
    return request, place_here(request.machine, num_ranks, cores_here())


def _not_of_ranks(asked: ClusterOptions) -> list[str]:
    """What only layouts have that are predicted."""
    ours = {f"--{field.name.replace('_', '-')}" for field in fields(RanksOptions)}
    ours |= {"--cluster", "--gpus", "--global-batch", "--micro-batch", "--no-offload"}
    if asked.precision == "bf16":
        ours.add("--precision")
    ours |= {f"--{axis}" for axis in ("tp", "cp", "ep") if getattr(asked, axis) == 1}
    return [flag for flag in asked.given() if flag not in ours]


def _refusal(flags: Sequence[str]) -> LayoutError:
    return LayoutError(f"{', '.join(flags)} is not of ranks that run: leave it out")


def _fixed(asked: RanksOptions, wanted: PlanOptions) -> dict[str, Any]:
    """Fields of the layout that are given."""
    if asked.pipeline is not None and asked.pipeline not in _PIPELINES:
        raise LayoutError(
            f"--pipeline '{asked.pipeline}' is none that ranks run; these are: "
            f"{', '.join(_PIPELINES)}"
        )
    require_known("--reduction", asked.reduction, get_args(Reduction))
    names = ("pp", "dp", "virtual_stages", "zero", "reduction", "pipeline")
    found = {name: getattr(asked, name) for name in names if getattr(asked, name) is not None}
    if wanted.recompute is not None:
        require_known("--recompute", word := recompute_word(wanted.recompute), (*RECOMPUTE_LEVELS,))
        found["recompute"] = word
    return found


def _why_not(found: PlannedRanks) -> str | None:
    return why_not_here(found.spec, found.recipe, found.chosen.layout)


def _tell(found: PlannedRanks, summary: Summary, charged: RunOptions, *, as_json: bool) -> None:
    schedule, place, chosen = found.schedule, found.place, found.chosen
    bill = charged.bill(summary.tokens_per_s, schedule.mesh.size)
    rounds = chosen.workload.rounds_per_step // chosen.layout.dp
    workload = chosen.workload.model_copy(update={"rounds_per_step": rounds})
    if as_json:
        shown = {
            "layout": schedule.layout,
            "recipe": found.recipe,
            "runs_here": (why := _why_not(found)) is None,
            "why_not_here": why,
            "candidates": [str(one) for one in chosen.candidates],
            "workload": workload,
            "stages": stages_figures(schedule),
            "predicted": summary,
            "assumed": place.assumed or None,
            "plan_seconds": found.seconds,
        }
        print_json(shown if bill is None else shown | {"bill": bill})
        return
    print_report(ranks_screen(schedule, workload, summary, place.cluster.name, found.seconds))
    others = [str(one) for one in chosen.candidates if one.layout != chosen.layout]
    why = _why_not(found)
    runs = "Runs here" if why is None else f"Does not run here: {why}"
    print_report(f"Recipe: {recipe_text(found.spec, found.recipe)}. {runs}.")
    if others:
        print_report(f"Other layouts: {'; '.join(others)}.")
    if bill is not None:
        print_report(bills_screen([told(chosen.layout)], [bill], charged.num_tokens))
    if place.assumed:
        print_report(f"Assumed for the prediction: {place.assumed}.")


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
        found = question.answer(asked.keep or KEPT)
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
            print_json(_layouts_json(found, errors, bills, seconds))
        else:
            print_report(layouts_screen(job, cluster, found, errors, seconds))
            if charged.is_charged:
                names = [told(one.layout) for one in found.best]
                charges = [bill for bill in bills if bill is not None]
                print_report(bills_screen(names, charges, charged.num_tokens))
    if output is not None and not as_json:
        print_report(f"Wrote the schedule of the first to {output}.")


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
