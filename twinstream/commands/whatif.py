"""`whatif`: what throughput hangs on, and what would reach a target."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twinstream.commands.arguments import options
from twinstream.commands.arguments.grouped import grouped
from twinstream.commands.arguments.outputs import output_option
from twinstream.commands.arguments.price_options import RunOptions
from twinstream.commands.output import print_json, print_report, progress
from twinstream.cost.bill import Bill
from twinstream.hardware_profiles.clusters.loader import load_cluster, place_names
from twinstream.hardware_profiles.loader import load_machine
from twinstream.options.plan_options import ClusterOptions, PlanOptions
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import write_text
from twinstream.study.answer import StudyError
from twinstream.study.query import Query
from twinstream.study.questions import asked_by, notes_of
from twinstream.study.whatif.target import check_target

if TYPE_CHECKING:
    from twinstream.study.whatif.whatif import Change

CHANGES = "-50%,-10%,+10%,+100%"
_MOST_CHANGE = 100.0


class ChangesError(TwinstreamError):
    """Changes that cannot be read."""


@dataclass(frozen=True)
class WhatIfOptions:
    """Changes to make, and by how much."""

    changes: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help=f"How much each property changes; by default {CHANGES}, of a cluster +100% (and "
            "memory -50%).",
        ),
    ] = None
    written: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Instead of each property by itself, change these together. May be given again: a "
            "number of the machine or cluster (hbm_bytes_per_s=4e12, nic_bytes_per_s=1e11, "
            "device_memory_bytes=24GiB, levels.spine.oversubscription=2), the caps of one device "
            "(device_mem, host_mem), seq_len, gpus, global_batch, precision, price_per_gpu_hour, a "
            "field of the layout (tp=4, tp=open) or any other name that a sweep has.",
        ),
    ] = None
    target: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="Search the smallest memory or link for 12000tok/s, or for 95% of what compute "
            "alone could do.",
        ),
    ] = None
    jobs: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Processes; by default one a core.")
    ] = None

    @property
    def num_jobs(self) -> int:
        return self.jobs or os.cpu_count() or 1

    def require_one_question(self, charged: RunOptions, output: Path | None) -> None:
        """Refuse options that ask for two things at once.

        Raises:
            TwinstreamError: says which to leave out.
        """
        if self.target is not None:
            check_target(self.target)
            beside = {
                "--changes": self.changes, "--set": self.written, "-o": output,
                **dict.fromkeys(charged.given(), True),
            }  # fmt: skip
            if given := [flag for flag, value in beside.items() if value]:
                raise StudyError(
                    "--target makes no changes, and has no page or bill of them: leave out it or "
                    + ", ".join(given)
                )
        if self.changes is not None and self.written:
            raise StudyError("--changes is of every number, --set of those it names: leave one out")


@grouped("model", "seq_len")
def whatif(
    wanted: PlanOptions,
    asked: ClusterOptions,
    charged: RunOptions,
    how: WhatIfOptions,
    output: Annotated[Path | None, output_option("Write a page with a chart here.")] = None,
    as_json: options.Json = False,
) -> None:
    """Say what throughput hangs on: plan again with each cap and machine number changed.

    With --target, search the smallest device memory, host memory or link that reaches it. Where
    more of something is not faster by a plan of its own, it has the plan of less.

    With --cluster, links, HBM, compute, memory and GPUs change: the step with the layout that was
    the fastest before, and with the one that is then.
    """
    how.require_one_question(charged, output)
    factors = [1 + change for change in changes_of(how.changes)] if how.changes else []
    charged.require_possible()
    query = asked_by(wanted, asked)
    if how.target is None:
        prices, charged = charged, charged.on(wanted.machine, asked.cluster)
    if not as_json:
        print_report(*notes_of(wanted))
    if how.target is not None:
        _search(query, how.target, how.num_jobs, as_json=as_json)
    else:
        _vary(query, how, factors, (charged, prices), output, as_json=as_json)


def _vary(
    query: Query, how: WhatIfOptions, factors: list[float],
    bills: tuple[RunOptions, RunOptions], output: Path | None, *, as_json: bool,
) -> None:  # fmt: skip
    from twinstream.study.whatif.screen import what_if_html, what_if_screen
    from twinstream.study.whatif.whatif import usual_changes, written_change
    from twinstream.study.whatif.whatif import whatif as studied

    charged, prices = bills

    def billing(tokens_per_s: float, num_gpus: int, price: float | None) -> Bill | None:
        own = charged if price is None else charged.at(price)
        return own.bill(tokens_per_s, num_gpus, of_gpus=query.subject.num_gpus)

    changes = [written_change(how.written, query)] if how.written else usual_changes(query, factors)
    changes = [_with_price(change, prices) for change in changes]
    for change in changes:
        if change.price is not None:
            charged.at(change.price).require_possible()
    with progress(f"planning {query.subject.title}", len(changes), quiet=as_json) as advance:
        found = studied(query, changes, billing, how.num_jobs, advance)
    if output is not None:
        write_text(what_if_html(found, charged.tokens), output)
    if as_json:
        print_json(found)
        return
    print_report(what_if_screen(found, charged.tokens))
    if output is not None:
        print_report(f"Wrote {output}.")


def _with_price(change: "Change", prices: RunOptions) -> "Change":
    """The change with the price of its own machine or cluster, where prices are by name."""
    machine, cluster = (change.values.get(name) for name in ("machine", "cluster"))
    if change.price is not None or not isinstance(prices.price_per_gpu_hour, dict):
        return change
    if cluster is None and machine is None:
        return change
    place = load_machine(str(machine)) if cluster is None else load_cluster(str(cluster))
    price = prices.of_place(*place_names(place)).price_per_gpu_hour
    assert isinstance(price, float)
    return replace(change, price=price)


def _search(query: Query, target: str, num_jobs: int, *, as_json: bool) -> None:
    from twinstream.study.whatif.screen import target_screen
    from twinstream.study.whatif.target import search_target, searched_properties

    told = f"searching what reaches the target: {query.subject.title}"
    with progress(told, len(searched_properties(query)), quiet=as_json) as advance:
        found = search_target(query, target, num_jobs, advance)
    print_json(found) if as_json else print_report(target_screen(found))


def changes_of(text: str) -> tuple[float, ...]:
    """
    >>> changes_of("-50%, +100%")
    (-0.5, 1.0)

    Raises:
        ChangesError: the text is no such list.
    """
    found = []
    for part in text.split(","):
        try:
            change = float(part.strip().removesuffix("%")) / 100 if "%" in part else float(part)
        except ValueError:
            change = -1.0
        if change >= 1 and "%" not in part:
            raise ChangesError(
                f"the change '{part.strip()}' has no %: write {change:g}% or {100 * change:g}%"
            )
        if not -1.0 < change <= _MOST_CHANGE or change == 0:
            raise ChangesError(
                f"cannot read the change '{part.strip()}'; write a list as -50%,-10%,+10%,+100% "
                "(more than -100%, and not 0)"
            )
        found.append(change)
    if len(set(found)) < len(found):
        raise ChangesError(f"'{text}' names a change twice")
    return tuple(found)
