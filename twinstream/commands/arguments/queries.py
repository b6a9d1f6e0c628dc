"""From the options of `plan`, `whatif` and `run` to the one query that they all ask."""

from collections.abc import Sequence
from typing import Any

from twinstream.clusters.search.question import KEPT
from twinstream.commands.arguments.cluster_options import ClusterOptions
from twinstream.commands.arguments.plan_options import PlanOptions
from twinstream.commands.arguments.price_options import RunOptions
from twinstream.commands.arguments.requests import request_of, require_known
from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of, place_names
from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.parallel.layout import LayoutError
from twinstream.options.option_group import flag_of
from twinstream.options.step_options import RankOptions
from twinstream.planner.choices import RECOMPUTE_LEVELS, recompute_word
from twinstream.study.many_gpus import LayoutQuery
from twinstream.study.one_device import DeviceQuery
from twinstream.study.query import Query
from twinstream.study.several_ranks import RanksQuery

_NOT_OF_RANKS = ("--policy", "--prefetch", "--effort", "--optimizer-overhead")


def query_of(wanted: PlanOptions, asked: ClusterOptions, num_ranks: int | None = None) -> Query:
    """What is asked: of one device; of ranks, whose layouts all run here; or of a cluster's GPUs.

    Args:
        num_ranks: where ranks are asked for by name.

    Raises:
        TwinstreamError: an option is missing, unknown, cannot be read, or is of another query.
    """
    if num_ranks is None and asked.is_of_one_device(wanted):
        return DeviceQuery(request_of(*asked.one_device(wanted)))
    if num_ranks is None and not asked.is_of_ranks(wanted):
        return LayoutQuery(asked.question(wanted), asked.keep or KEPT)
    num_ranks = num_ranks or asked.gpus
    assert num_ranks is not None, "GPUs of a machine are counted"
    if asked.gpus not in (None, num_ranks):
        raise LayoutError(f"--ranks {num_ranks} and --gpus {asked.gpus} both count: leave out one")
    if beside := _not_of_ranks(asked):
        raise _refusal(beside)
    return query_of_ranks(num_ranks, asked.of_devices(wanted), asked, asked.cluster)


def query_of_ranks(
    num_ranks: int, wanted: PlanOptions, asked: RankOptions, where: str | None
) -> RanksQuery:
    """Of ranks on the nodes of a cluster, by default on one machine, whose links are assumed.

    Args:
        where: a cluster, whose nodes are planned for unless a machine is given.

    Raises:
        LayoutError: an option is not of ranks that run here, or they cannot be laid out so.
        TwinstreamError: an option is missing, unknown, or cannot be read.
    """
    fixed = _fixed(asked, wanted)
    if beside := [flag for flag in wanted.given() if flag in _NOT_OF_RANKS]:
        raise _refusal(beside)
    cluster, machine = None if where is None else load_cluster(where), None
    if wanted.machine is None:
        if cluster is None:
            raise LayoutError("--ranks needs --machine (of one rank), or --cluster with its nodes")
        machine = machine_of(cluster)
    request = request_of(wanted, machine)
    caps = (wanted.device_mem, wanted.host_mem)
    return RanksQuery.asked(request, num_ranks, cluster, fixed, caps)


def _not_of_ranks(asked: ClusterOptions) -> list[str]:
    """What only layouts have that are predicted."""
    ours = {flag_of(name) for name in RankOptions.model_fields}
    ours |= {"--cluster", "--gpus", "--global-batch", "--micro-batch", "--no-offload"}
    if asked.precision == "bf16":
        ours.add("--precision")
    ours |= {f"--{axis}" for axis in ("tp", "cp", "ep") if getattr(asked, axis) == 1}
    return [flag for flag in asked.given() if flag not in ours]


def _refusal(flags: Sequence[str]) -> LayoutError:
    return LayoutError(f"{', '.join(flags)} is not of ranks that run: leave it out")


def _fixed(asked: RankOptions, wanted: PlanOptions) -> dict[str, Any]:
    """Fields of the layout that are given."""
    asked.require_run()
    found = asked.layout_fields()
    if wanted.recompute is not None:
        require_known("--recompute", word := recompute_word(wanted.recompute), (*RECOMPUTE_LEVELS,))
        found["recompute"] = word
    return found


def charged_at(charged: RunOptions, wanted: PlanOptions, asked: ClusterOptions) -> RunOptions:
    """What a run is charged where it is planned, if prices are by name.

    Raises:
        CostError: none is of this machine or cluster.
    """
    names = () if asked.cluster is None else place_names(load_cluster(asked.cluster))
    if wanted.machine is not None:
        names += place_names(load_machine(wanted.machine))
    return charged.of_place(*names)
