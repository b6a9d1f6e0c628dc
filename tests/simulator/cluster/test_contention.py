"""What flows at once shares links and compute, in closed form."""

from collections.abc import Mapping, Sequence

import pytest

from tests.hardware_profiles.machines import number
from tests.helpers.cluster_sketches import talk
from tests.helpers.flat_machine import (
    D2H_PER_NS,
    DRAM_PER_NS,
    FLOP_PER_NS,
    LAUNCH_NS,
    flat_machine,
)
from tests.helpers.sketches import feed, op, sketch
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.schedule.cost import Work
from twinstream.schedule.document import Axis, Exchange, Mesh, RankClass, Schedule
from twinstream.schedule.ops import KernelCall, Op
from twinstream.schedule.workload import MachineRef
from twinstream.simulator.network_costs import ClusterCosts
from twinstream.simulator.replay import replay_cluster

NIC_PER_NS, NODE_PER_NS = 10, 100
LOST = 0.1
X_BYTES = 6000
WIRE_NS = X_BYTES // NIC_PER_NS
KERNEL_NS = 1000
NUMBERS = {
    "gpus_per_node": 1, "nics_per_node": 1, "nic_bytes_per_s": NIC_PER_NS * 1e9,
    "network_efficiency": 1, "node_bytes_per_s": NODE_PER_NS * 1e9, "node_efficiency": 1,
    "collective_latency_ns": 0, "node_latency_ns": 0, "network_latency_ns": 0, "compute_lost": 0,
}  # fmt: skip
Times = dict[str, tuple[int, int]]


def spans(
    stages: Sequence[Sequence[Op]],
    *exchanges: Sequence[tuple[str, str]],
    wait_ns: int = 0,
    **changes: float,
) -> list[Times]:
    """When ops of the stages run, of a mesh of as many stages and two replicas."""
    numbers = {field: number(value) for field, value in {**NUMBERS, **changes}.items()}
    cluster = Cluster.model_validate(
        {"name": "toy", "description": "", "machine": "h100", **numbers}
    )
    schedule = document(stages, exchanges)
    costs = ClusterCosts(schedule, cluster, flat_machine(event_wait_latency_ns=number(wait_ns)))
    timeline = replay_cluster(schedule, costs, "toy", num_passes=1)
    return [times(schedule, timeline.classes, str(at)) for at in range(len(stages))]


def times(schedule: Schedule, classes: Mapping, name: str) -> Times:
    cold = classes[name].cold
    ids = [one.op_id for one in schedule.schedules[name].ops]
    return dict(zip(ids, zip(cold.start_ns, cold.end_ns, strict=True), strict=True))


def document(stages, exchanges) -> Schedule:
    work = Work(unit="matmul", shape=(), flops=KERNEL_NS * FLOP_PER_NS, hbm_bytes=0, launches=0)
    calls = {"call": KernelCall(kernel="nothing/eager", attributes={}, cost=(work,))}
    names = [str(at) for at in range(len(stages))]
    axes = (Axis(name="pp", size=len(stages)), Axis(name="dp", size=2))
    return Schedule(
        mesh=Mesh(axes=axes, ranks_per_node=1),
        classes=tuple(RankClass(name=n, schedule=n, cells={"pp": (int(n),)}) for n in names),
        schedules={
            n: sketch(ops, X_BYTES, calls=calls) for n, ops in zip(names, stages, strict=True)
        },
        order=tuple(Exchange(sides=tuple(sides)) for sides in exchanges),
        model={}, layout={}, seq_len=8, global_batch=1, model_flops=1,
        machine=MachineRef(name="toy", content_hash=""),
    )  # fmt: skip


KERNEL = op("kernel", "compute")  # a cluster that computes nothing has no step time


def test_alone_a_sum_of_two_replicas_and_a_message_take_the_wires_time():
    assert spans([[talk("sum", "dp"), KERNEL]], [("0", "sum")])[0]["sum"] == (0, WIRE_NS)
    sent = [[talk("s", "send"), KERNEL], [talk("r", "recv"), KERNEL]]
    first, second = spans(sent, [("0", "s"), ("1", "r")])
    assert first["s"] == second["r"] == (0, WIRE_NS)


def test_a_sum_and_a_message_on_one_nic_take_turns():
    stages = [[talk("sum", "dp"), talk("s", "send"), KERNEL], [talk("r", "recv"), KERNEL]]
    first, second = spans(stages, [("0", "sum")], [("0", "s"), ("1", "r")])
    # X bytes out of the first stage for each, at half of the NIC's rate
    assert first["sum"] == first["s"] == second["r"] == (0, 2 * WIRE_NS)


def test_messages_of_two_directions_do_not_meet():
    back = talk("back", "send.prev", shift=-1)
    taken = talk("taken", "recv.next", shift=1)
    stages = [[talk("s", "send"), taken, KERNEL], [talk("r", "recv"), back, KERNEL]]
    first, second = spans(stages, [("0", "s"), ("1", "r")], [("0", "taken"), ("1", "back")])
    assert first["s"] == first["taken"] == second["back"] == (0, WIRE_NS)


def test_two_messages_out_of_one_rank_share_its_nic():
    more = [talk("s2", "send.more", sequence=1), talk("r2", "recv.more", sequence=1)]
    stages = [[talk("s", "send"), more[0], KERNEL], [talk("r", "recv"), more[1], KERNEL]]
    first, _ = spans(stages, [("0", "s"), ("1", "r")], [("0", "s2"), ("1", "r2")])
    assert first["s"] == first["s2"] == (0, 2 * WIRE_NS)


def test_gpus_of_a_node_have_their_share_of_its_nic():
    # Two GPUs, one NIC: stages on nodes of their own, two replicas in each. A message alone has
    # half of the NIC, beside a second one out of the same rank a quarter.
    more = [talk("s2", "send.more", sequence=1), talk("r2", "recv.more", sequence=1)]
    stages = [[talk("s", "send"), more[0], KERNEL], [talk("r", "recv"), more[1], KERNEL]]
    exchanges = [("0", "s"), ("1", "r")], [("0", "s2"), ("1", "r2")]
    first, _ = spans([one[:1] + one[2:] for one in stages], exchanges[0], gpus_per_node=2)
    assert first["s"] == (0, 2 * WIRE_NS)
    first, _ = spans(stages, *exchanges, gpus_per_node=2)
    assert first["s"] == first["s2"] == (0, 4 * WIRE_NS)


def test_a_collective_takes_compute_while_it_runs():
    (found,) = spans([[talk("sum", "dp"), KERNEL]], [("0", "sum")], compute_lost=LOST)
    assert found["sum"] == (0, WIRE_NS)
    # of 1000 ns 540 are done in the collective's 600
    assert found["kernel"] == (0, WIRE_NS + KERNEL_NS - round((1 - LOST) * WIRE_NS))


def test_each_end_of_a_message_takes_half_of_that():
    stages = [[talk("s", "send"), KERNEL], [talk("r", "recv"), KERNEL]]
    first, second = spans(stages, [("0", "s"), ("1", "r")], compute_lost=LOST)
    expected = WIRE_NS + KERNEL_NS - round((1 - LOST / 2) * WIRE_NS)
    assert first["kernel"] == second["kernel"] == (0, expected)


@pytest.mark.parametrize(("behind", "left"), [(1, D2H_PER_NS - NIC_PER_NS), (0, D2H_PER_NS)])
def test_copies_to_the_host_share_the_pcie_link_with_a_nic_behind_it(behind, left):
    (found,) = spans(
        [[talk("sum", "dp"), op("out", "d2h"), KERNEL]], [("0", "sum")], nic_on_pcie=behind
    )
    assert found["sum"] == (0, WIRE_NS)
    assert found["out"] == (0, 7 + X_BYTES // left)


def test_copies_both_ways_and_a_nic_share_what_the_link_has_both_ways():
    # 60 bytes a ns in all: the NIC takes 2 x 10 of them, the copies 20 each
    stage = [talk("sum", "dp"), op("out", "d2h"), op("in", "h2d"), KERNEL]
    (found,) = spans([stage], [("0", "sum")], nic_on_pcie=1)
    assert found["sum"] == (0, WIRE_NS)
    assert found["out"] == found["in"] == (0, 7 + X_BYTES // 20)


@pytest.mark.parametrize("gpus", [1, 4])
def test_host_dram_is_divided_among_a_nodes_gpus(gpus):
    (found,) = spans([[feed("tokens"), KERNEL]], gpus_per_node=gpus)
    on_node = min(gpus, 2)  # two replicas: a node has no more ranks
    assert found["tokens"] == (0, LAUNCH_NS + X_BYTES * on_node // DRAM_PER_NS)


def test_what_is_within_a_node_leaves_the_nic_to_others():
    # two replicas on a node: their sum is on the node's links, the message on the NIC
    stages = [[talk("sum", "dp"), talk("s", "send"), KERNEL], [talk("r", "recv"), KERNEL]]
    first, _ = spans(
        stages, [("0", "sum")], [("0", "s"), ("1", "r")], gpus_per_node=2, nics_per_node=2
    )
    assert first["sum"] == (0, X_BYTES // NODE_PER_NS)
    assert first["s"] == (0, WIRE_NS)


def test_a_message_begins_when_both_ends_are_through_with_their_waits():
    # the sender is told of its copy after 157 ns, and begins 600 later; the receiver at 600
    before = talk("before", "recv.q", collective="all_reduce", axes=("dp",), shift=0)
    stages = [
        [op("out", "d2h"), talk("s", "send", waits=("out",)), KERNEL],
        [before, talk("r", "recv.q"), KERNEL],
    ]
    first, second = spans(stages, [("1", "before")], [("0", "s"), ("1", "r")], wait_ns=600)
    copied = 7 + X_BYTES // D2H_PER_NS
    assert first["s"] == (copied + 600, copied + 600 + WIRE_NS)
    assert second["r"] == (WIRE_NS, copied + 600 + WIRE_NS)
