"""A cluster's schedule within the memories of its nodes: each class planned by the planner."""

from twinstream.clusters.job import Job
from twinstream.clusters.lowering.lower import in_one_order
from twinstream.clusters.offloading.movable import StageTimes
from twinstream.clusters.offloading.stage_plan import Within, planned
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.planner import gc_paused
from twinstream.planner.request import caps_of
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
from twinstream.schedule.cluster.cluster_timeline import ClusterTimeline
from twinstream.schedule.cluster.verify_cluster import require_safe_cluster
from twinstream.schedule.document import Caps, Schedule
from twinstream.simulator.network_costs import ClusterCosts, share_of
from twinstream.simulator.replay import replay_cluster, steady_state


def offloaded(
    document: ClusterSchedule,
    job: Job,
    cluster: Cluster,
    machine: Machine,
    caps: Caps | None = None,
) -> ClusterSchedule:
    """The document with every stage within its GPUs' memory and their share of the host's.

    What a stage keeps where and when it is copied is for the ordinary planner, which sees each
    stage by itself, as long as its ops take with everything on the device. What it decides is
    simulated with all stages, and all that they share, by `simulate_cluster`.

    Args:
        document: lowered from the job, with everything on the device.
        job: whose layout has `offload`: its layers have ops of their own.
        machine: of a node.
        caps: of one GPU; None: all that the node has.

    Raises:
        OffloadError: a stage does not fit.
        MissingNumberError: a profile lacks a number that is needed.
    """
    assert job.layout.offload, "layers together in one op cannot leave one by one"
    share = share_of(machine, min(cluster.count("gpus_per_node"), document.mesh.size))
    within = Within(share, caps or caps_of(share, None, None), steady_state)
    with gc_paused():
        costs = ClusterCosts(document, cluster, machine)
        told = replay_cluster(document, costs, cluster.name, num_passes=2)
        schedules: dict[str, Schedule] = {}
        for one in document.classes:
            if one.schedule not in schedules:
                times = _times(told, one.name)
                schedules[one.schedule] = planned(one.name, document.of(one), times, within)
        found = in_one_order(document.model_copy(update={"schedules": schedules}))
    require_safe_cluster(found)
    return found


def _times(told: ClusterTimeline, name: str) -> StageTimes:
    return StageTimes(told.classes[name].passes[-1].start_ns, told.step_ns)
