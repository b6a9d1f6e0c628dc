"""Options of generating text as requests: of one device, or of every way to split a model over
GPUs."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.models.decoders.rank_share import RankShareError, rank_share
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layouts.layout import LayoutError
from twinstream.options.plan_options import ClusterOptions, PlanOptions
from twinstream.planner.generation import TextGeneration
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.request import caps_of
from twinstream.schedule.errors import ArgumentError, TwinstreamError
from twinstream.study.generation import GenerationRanks, PlannedGeneration
from twinstream.study.one_device import DeviceQuery
from twinstream.study.query import Loader
from twinstream.study.questions import around, asked_by

_DEGREES = ("tp", "pp", "dp")
_PLACES = ("--cluster", "--gpus", "--tp", "--pp", "--dp")


def generations(
    generation: TextGeneration, wanted: PlanOptions, asked: ClusterOptions
) -> list[PlannedGeneration]:
    """Plan generating text by all layouts that are not ruled out, the fastest first.

    Those whose weights and cache have no room on the devices are planned where there are no others.

    Raises:
        ArgumentError: an option is of training.
        LayoutError: the GPUs cannot be divided so.
        InfeasiblePlan: none fits the caps.
    """
    if beside := [flag for flag in asked.given() if flag not in _PLACES]:
        raise ArgumentError(f"{', '.join(beside)} is of a training step, not of --task inference")
    wanted, load = wanted.model_copy(update={"seq_len": str(generation.prompt)}), Loader()
    query = asked_by(wanted, asked.model_copy(update=_ALONE), None, load, "device")
    assert isinstance(query, DeviceQuery), "that is the kind"
    request = query.request
    gpus = asked.gpus or prod(getattr(asked, name) or 1 for name in _DEGREES)
    if gpus == 1:
        return [PlannedGeneration.of(generation, request)]
    cluster = (
        around(request.machine, gpus, wanted)
        if asked.cluster is None
        else load.cluster(asked.cluster)
    )
    on_host = min(gpus, cluster.count("gpus_per_node"))
    caps = caps_of(request.machine, wanted.device_mem, wanted.host_mem, on_host)
    request = replace(request, caps=caps)
    spec = generation.decoder_of(request)
    open_ones = list(_ranks_of(asked, gpus, cluster, spec, generation.batch))
    most = caps.device_bytes
    kept = [one for one in open_ones if most is None or _held_bytes(spec, generation, one) <= most]
    found: list[PlannedGeneration] = []
    reasons: list[InfeasiblePlan] = []
    for ranks in (*kept, *(one for one in open_ones if one not in kept)):
        if found and ranks not in kept:
            break
        try:
            found.append(PlannedGeneration.of(generation, request, ranks=ranks))
        except InfeasiblePlan as error:
            reasons.append(error)
    if not found:
        raise reasons[-1]
    return sorted(found, key=lambda one: one.seconds)


def _held_bytes(spec: ModelSpec, generation: TextGeneration, ranks: GenerationRanks) -> int:
    """Bytes of weights and cache of a GPU, on the mean over stages."""
    heads = max(1, spec.num_kv_heads // ranks.tp)
    rows = generation.room * generation.batch // ranks.dp * spec.num_layers
    cache = 2 * heads * spec.head_dim * rows * spec.itemsize
    return (spec.num_parameters * spec.itemsize // ranks.tp + cache) // ranks.pp


_ALONE = {"gpus": None, "tp": None, "pp": None, "dp": None}


def _ranks_of(
    asked: ClusterOptions, gpus: int, cluster: Cluster, spec: ModelSpec, batch: int
) -> Iterator[GenerationRanks]:
    """Yield the ways to split the model; left open, tp stays within a node.

    Raises:
        LayoutError: there is none, or the model cannot be split as asked for.
    """
    most = cluster.most_nodes
    room = None if most is None else cluster.count("most_nodes") * cluster.count("gpus_per_node")
    if room is not None and gpus > room:
        raise LayoutError(f"--gpus {gpus:,}: cluster '{cluster.name}' has {room:,} GPUs")
    reason: TwinstreamError = LayoutError(
        f"--gpus {gpus} are not --tp x --pp x --dp: give degrees whose product that is"
    )
    is_any = False
    for tp in _divisors(gpus, asked.tp, cluster.count("gpus_per_node")):
        for pp in _divisors(gpus // tp, asked.pp, spec.num_layers):
            dp = gpus // tp // pp
            if asked.dp not in (None, dp):
                continue
            try:
                rank_share(spec, tp, range(spec.num_layers))
            except RankShareError as error:
                reason = error
                continue
            if batch % dp:
                reason = LayoutError(
                    f"{batch} sequences do not divide among {dp} replicas: give a --batch that "
                    "does, or other degrees"
                )
                continue
            is_any = True
            yield GenerationRanks(tp, pp, dp, cluster)
    if not is_any:
        raise reason


def _divisors(count: int, given: int | None, most: int) -> list[int]:
    """Those of a count that are open; the one that is given, if it is one."""
    if given is not None:
        return [given] if count % given == 0 else []
    return [one for one in range(1, min(count, most) + 1) if count % one == 0]
