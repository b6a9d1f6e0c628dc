"""The cost of ops and exchanges of a cluster's schedule on a cluster's profile."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

from twinstream.hardware_profiles.clusters.curves import Collective, Sums
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.collectives.rank_group import RankGroup
from twinstream.hardware_profiles.collectives.timing import collective_time_ns
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.document import Exchange, Mesh, RankClass, Schedule
from twinstream.schedule.ops import Communicate
from twinstream.simulator.costs import CostModel, MachineCosts

IN_PIECES = ("all_gather", "reduce_scatter")  # what products over tp may hide
_OF_A_NODE = (  # what its GPUs share
    "host_dram_bytes_per_s",
    "host_memory_bytes",
    "disk_memory_bytes",
    "disk_read_bytes_per_s",
    "disk_write_bytes_per_s",
)
_NCCL_DTYPES = {"bfloat16": "half", "float16": "half", "uint8": "int8", "fp8": "int8"}


@dataclass(frozen=True, slots=True)
class ExchangeCost:
    """The cost of an exchange: latency, then `alone_ns` (0: none) on each side's resources."""

    fixed_ns: int
    alone_ns: float
    sides: tuple[tuple[tuple[str, float], ...], ...] = ()


class MeshCosts(Protocol):
    """Prices ops of classes of ranks, by their number in the document, and exchanges."""

    def rank(self, number: int) -> CostModel: ...

    def exchange(self, exchange: Exchange) -> ExchangeCost: ...


class ClusterCosts:
    """Prices by the profiles of a cluster and its node.

    Host DRAM, host memory, a drive and NICs are a node's: each of its GPUs has its equal share. A
    collective
    takes what `collective_time_ns` says, and while it runs draws on all sides: `compute_lost` of
    the GPU's compute; what the rank sends and receives between nodes of its NICs and, where NICs
    are behind the GPU's PCIe link (`nic_on_pcie`), of that link; what stays in the node of its
    links there. Of collectives of tp that the layout overlaps with products `tp_exposed` is
    waited for. The sender of a message draws on what goes out, the receiver on what comes in, and
    on half of `compute_lost` each: who does both at once, as in a ring, loses all of it.

    Args:
        machine: of a node; `machines` of classes (by name) that are not like the others.
    """

    def __init__(
        self,
        schedule: Schedule,
        cluster: Cluster,
        machine: Machine,
        machines: Mapping[str, Machine] | None = None,
    ) -> None:
        self._cluster = cluster
        self._overlaps_tp = bool(schedule.layout.get("tp_overlap"))
        gpus = min(cluster.count("gpus_per_node"), schedule.mesh.size)  # that share a node's host
        self._mesh = schedule.mesh.model_copy(
            update={"ranks_per_node": cluster.count("gpus_per_node")}
        )
        self._classes = {one.name: one for one in schedule.classes}
        network = _network_capacity(cluster)
        first = schedule.of(schedule.classes[0])
        self._node_rates = MachineCosts(first, share_of(machine, gpus), network).capacity
        self._weights = machine.duplex_weights()
        known: dict[tuple[str, str], MachineCosts] = {}
        self._ranks: list[MachineCosts] = []
        self._ops: dict[str, dict[str, Communicate]] = {}
        self._sizes: dict[str, dict[str, tuple[int, str]]] = {}
        for one in schedule.classes:
            own = (machines or {}).get(one.name, machine)
            key = one.schedule, own.content_hash
            if key not in known:
                part = schedule.schedules[one.schedule]
                known[key] = MachineCosts(part, share_of(own, gpus), network)
            self._ranks.append(known[key])
        for name, part in schedule.schedules.items():
            self._sizes[name] = {t.tensor_id: (t.size_bytes, t.dtype) for t in part.tensors}
            self._ops[name] = {op.op_id: op for op in part.ops if isinstance(op, Communicate)}
        self._known: dict[tuple[object, ...], ExchangeCost] = {}

    def rank(self, number: int) -> CostModel:
        return self._ranks[number]

    def exchange(self, exchange: Exchange) -> ExchangeCost:
        name, op_id = exchange.sides[0]
        one = self._classes[name]
        op = self._ops[one.schedule][op_id]
        size_bytes, dtype = self._size(one.schedule, op)
        where = one.cells.get(op.axes[0]) if op.shift else None
        key = (
            *(op.collective, op.axes, op.shift, size_bytes, dtype, where, len(exchange.sides)),
            op.reduction,
        )
        if key not in self._known:
            group = group_of(self._mesh, one, op)
            others = [self._ops[self._classes[n].schedule][o] for n, o in exchange.sides[1:]]
            sides = [side.collective for side in (op, *others)]
            pieces = self._overlaps_tp and op.axes == ("tp",) and op.collective in IN_PIECES
            exposed = self._cluster.number("tp_exposed") if pieces else 1.0
            self._known[key] = self._priced(sides, size_bytes, dtype, group, exposed, sums_of(op))
        return self._known[key]

    def _size(self, schedule: str, op: Communicate) -> tuple[int, str]:
        """nccl-tests' size: the larger of what is given and what is received.

        Of rows of experts as many come as go where experts are equally busy, not as there is room.
        """
        sizes = self._sizes[schedule]
        if op.counts is not None:
            rows = [sizes[operand.tensor][0] for operand in op.operands[:2]]
            return min(rows), sizes[op.operands[0].tensor][1]
        given = made = 0
        for operand in op.operands:
            size_bytes, _ = sizes[operand.tensor]
            given += size_bytes * (operand.mode != "write")
            made += size_bytes * (operand.mode != "read")
        return max(given, made), sizes[op.operands[0].tensor][1]

    def _priced(
        self, sides: Sequence[str], size_bytes: int, dtype: str, group: RankGroup,
        exposed: float, sums: Sums | None,
    ) -> ExchangeCost:  # fmt: skip
        collective: Collective = "send_recv"
        if sides[0] not in ("send", "recv"):
            collective = sides[0]  # type: ignore[assignment]
        kind = _NCCL_DTYPES.get(dtype)
        alone = collective_time_ns(self._cluster, collective, size_bytes, group, kind, sums)
        time_ns = round(alone.time_ns * exposed)
        if not time_ns:
            return ExchangeCost(0, 0.0)
        between, within = _bytes_of_a_rank(collective, size_bytes, group)
        drawn = {side: self._drawn(side, time_ns, between, within) for side in set(sides)}
        return ExchangeCost(0, float(time_ns), tuple(drawn[side] for side in sides))

    def _drawn(
        self, side: str, time_ns: int, between: float, within: float
    ) -> tuple[tuple[str, float], ...]:
        """What one side draws: no more than the rates of a node that is like the others."""
        lost = self._cluster.number("compute_lost") * time_ns
        wanted = {"compute": lost / 2 if side in ("send", "recv") else lost}
        on_pcie = self._cluster.nic_on_pcie is not None and self._cluster.number("nic_on_pcie")
        to, back = self._weights
        for ends, nic, link, pcie, weight in (
            ("recv", "nic_out", "links_out", "d2h", back),
            ("send", "nic_in", "links_in", "h2d", to),
        ):
            if side != ends:
                wanted |= {nic: between, link: within}
                if on_pcie:
                    both = wanted.get("pcie", 0.0) + between * weight
                    wanted |= {pcie: between, "pcie": both}
        most = self._node_rates
        return tuple(
            (name, min(amount, most[name] * time_ns)) for name, amount in wanted.items() if amount
        )


def sums_of(op: Communicate) -> Sums | None:
    """Return who makes the sums of an op; None of one that adds nothing up."""
    if op.collective not in ("all_reduce", "reduce_scatter"):
        return None
    return "library" if op.reduction == "library" else "rank_order"


def share_of(machine: Machine, gpus_per_node: int) -> Machine:
    """Return one GPU's share of a node: its device, its link, its part of host DRAM and memory, and
    of the node's drive."""
    changes = {}
    for field in _OF_A_NODE:
        number = getattr(machine, field)
        if number is not None and number.value is not None:
            changes[field] = number.model_copy(update={"value": number.value / gpus_per_node})
    return machine.model_copy(update=changes)


def _network_capacity(cluster: Cluster) -> dict[str, float]:
    """Bytes per ns of a rank, each way: its share of NICs, its links to the node's other GPUs."""
    found = dict.fromkeys(("nic_out", "nic_in", "links_out", "links_in"), 0.0)
    if cluster.nic_bytes_per_s is not None:
        rail = cluster.number("nics_per_node") / cluster.number("gpus_per_node")
        rate = cluster.number("nic_bytes_per_s") * cluster.number("network_efficiency") * rail / 1e9
        found |= {"nic_out": rate, "nic_in": rate}
    if cluster.node_bytes_per_s is not None:
        rate = cluster.number("node_bytes_per_s") * cluster.number("node_efficiency") / 1e9
        found |= {"links_out": rate, "links_in": rate}
    return found


def _bytes_of_a_rank(
    collective: Collective, size_bytes: int, group: RankGroup
) -> tuple[float, float]:
    """What one rank sends to other nodes, and to others of its node."""
    laps = 2 if collective == "all_reduce" else 1
    near, nodes, ranks = group.ranks_per_node, group.nodes, group.ranks
    if collective == "send_recv":
        return (0.0, float(size_bytes)) if group.within_a_node else (float(size_bytes), 0.0)
    if collective == "all_to_all":
        each = size_bytes / ranks
        return (ranks - near) * each, (near - 1) * each
    between = laps * size_bytes / near * (nodes - 1) / nodes
    return between, laps * size_bytes * (near - 1) / near


def group_of(mesh: Mesh, one: RankClass, op: Communicate) -> RankGroup:
    """The group of an op of a class, with the groups beside it that use the same NICs.

    All groups of a node are taken to communicate at once, as equal schedules do. Of a message it
    is the two ranks; along a whole axis (a ring step) the pair that is farthest apart counts.
    """
    on_node = min(mesh.ranks_per_node, mesh.size)
    if not op.shift and op.collective != "send_recv":
        ranks = prod(mesh.length(axis) for axis in op.axes)
        near = equally_near(ranks, mesh.ranks_on_a_node(op.axes))
        return RankGroup(ranks=ranks, ranks_per_node=near, sharing=max(1, on_node // near))
    (axis,) = op.axes
    size, stride = mesh.length(axis), mesh.stride(axis)
    cell = one.cell(axis, size)
    if len(cell) == size:
        near = mesh.ranks_on_a_node((axis,))
        inside, sharing = near == size, max(1, on_node // near)
    else:
        places = [
            at * stride // on_node == (at + op.shift) % size * stride // on_node for at in cell
        ]
        inside, sharing = all(places), min(on_node, stride)
    if inside:
        return RankGroup(ranks=2, ranks_per_node=2)
    return RankGroup(ranks=2, ranks_per_node=1, sharing=sharing)


def equally_near(ranks: int, near: int) -> int:
    """Ranks of a group on each of its nodes, where nodes and axes need not divide one another: at
    most as many as on rank 0's, and equally many.

    >>> equally_near(512, 72)
    64
    """
    return next(count for count in range(near, 0, -1) if ranks % count == 0)
