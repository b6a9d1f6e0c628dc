"""`whatif --cluster`: what a step on a cluster hangs on, with its layout and with another."""

from pathlib import Path

from twinstream.clusters.layout import LayoutError
from twinstream.clusters.search.question import Question
from twinstream.commands.arguments.cluster_options import ClusterOptions
from twinstream.commands.arguments.plan_options import PlanOptions
from twinstream.commands.arguments.price_options import RunOptions
from twinstream.commands.output import print_json, print_report, progress
from twinstream.commands.plans.asking_options import WhatIfOptions, changes_of
from twinstream.cost.bill import Bill
from twinstream.schedule.files import write_text
from twinstream.whatif.target import check_target


def ask_on_cluster(
    wanted: PlanOptions,
    asked: ClusterOptions,
    charged: RunOptions,
    how: WhatIfOptions,
    output: Path | None,
    *,
    as_json: bool,
) -> None:
    """Search again with each change, and show what it does."""
    from twinstream.whatif.clusters.answers import what_if_on_cluster
    from twinstream.whatif.clusters.changes import usual_changes, written_change
    from twinstream.whatif.clusters.screen import cluster_html, cluster_screen

    _require_one_question(charged, how, output)
    question = asked.question(wanted)
    charged.require_possible()
    if how.target is not None:
        _search_target(question, asked.keep, how.target, how.num_jobs, as_json=as_json)
        return
    factors = [1 + change for change in changes_of(how.changes)] if how.changes else []
    changes = [written_change(how.written)] if how.written else usual_changes(question, factors)
    for change in changes:
        if change.price is not None:
            charged.at(change.price).require_possible()

    def billing(tokens_per_s: float, num_gpus: int, price: float | None) -> Bill | None:
        own = charged if price is None else charged.at(price)
        return own.bill(tokens_per_s, num_gpus, of_gpus=question.num_gpus)

    told = f"laying out {question.job.shape.name} on {question.num_gpus:,} GPUs"
    with progress(told, len(changes), quiet=as_json) as advance:
        found = what_if_on_cluster(question, changes, billing, asked.keep, how.num_jobs, advance)
    if output is not None:
        write_text(cluster_html(found, charged.tokens), output)
    if as_json:
        print_json(found)
        return
    print_report(cluster_screen(found, charged.tokens))
    if output is not None:
        print_report(f"Wrote {output}.")


def _search_target(
    question: Question, keep: int, target: str, num_jobs: int, *, as_json: bool
) -> None:
    from twinstream.whatif.clusters.changes import properties_of
    from twinstream.whatif.clusters.screen import cluster_target_screen
    from twinstream.whatif.clusters.target import search_cluster_target

    told, number = "searching what reaches the target", len(properties_of(question))
    with progress(told, number, quiet=as_json) as advance:
        found = search_cluster_target(question, target, keep, num_jobs, advance)
    if as_json:
        print_json(found)
    else:
        print_report(cluster_target_screen(found))


def _require_one_question(charged: RunOptions, how: WhatIfOptions, output: Path | None) -> None:
    if how.target is not None:
        check_target(how.target)
        beside = {
            "--changes": how.changes, "--set": how.written, "-o": output,
            **dict.fromkeys(charged.given(), True),
        }  # fmt: skip
        if given := [flag for flag, value in beside.items() if value]:
            raise LayoutError(
                "--target makes no changes, and has no page or bill of them: leave out it or "
                + ", ".join(given)
            )
    if how.changes is not None and how.written:
        raise LayoutError("--changes is of every number, --set of those it names: leave one out")
