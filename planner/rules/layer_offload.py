"""`layer_offload`: as FSDP with CPU offload, a layer's parameters loaded for every use."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.emit.emission import Emitted, emitted
from twinstream.planner.emit.unrolling import repeated
from twinstream.planner.lifetimes.host_tasks import HostContent, device_uses
from twinstream.planner.lifetimes.recomputes import at_level, declared_levels
from twinstream.planner.lifetimes.residencies import Residency, chosen_residencies
from twinstream.planner.lifetimes.uses import Unit, UnitMap
from twinstream.planner.rules.fitting import RulePlacement, first_fitting
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.ops import Compute, Copy


def plan_layer_offload(chain: Chain, machine: Machine, caps: Caps) -> RankSchedule:
    """Parameters, gradients and optimizer state live on the host, which runs AdamW.

    Models PyTorch's FSDP with CPU offload of parameters, on one device. A layer's parameters are
    loaded before its forward and again before its backward, one layer ahead, and dropped after
    use. In every round a layer's gradients go to the host after its backward; from the second
    round on the host adds them to those of the rounds before. AdamW runs on the host after the
    whole backward pass, and the next step starts when it has ended. Saved activations stay on the
    device: all of them if they fit, else every block is recomputed from its input.

    FSDP2 accumulates on the CPU like this; FSDP1 with CPU offload cannot accumulate outside
    `no_sync`. Kinder than FSDP2: the copies of gradients that are added up do not block the
    Python thread, embedding and head are layers of their own, and the chunks of a round share one
    load. Less kind: with several rounds the host keeps room for two sets of gradients. Left out:
    collectives, and the Python thread's own time.

    Source: `CPUOffload` and `no_sync` in https://docs.pytorch.org/docs/stable/fsdp.html,
    `CPUOffloadPolicy` in https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html,
    `foreach_reduce` in torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.

    Raises:
        InfeasiblePlan: a cap is too small; it says what would do, in bytes.
        MissingNumberError: the profile lacks a number of the host CPU.
    """
    return _synchronous(repeated(partial(_plan, machine=machine, caps=caps), chain))


def _plan(chain: Chain, machine: Machine, caps: Caps) -> Emitted:
    placement = first_fitting("layer_offload", caps, _placements(chain))
    return emitted(placement, machine, caps, "layer_offload")


def _placements(chain: Chain) -> Iterator[RulePlacement]:
    units = UnitMap(chain)
    for level in (None, *declared_levels(chain)[-1:]):
        yield _placed(chain, units, level)


def _frozen(chain: Chain, units: UnitMap) -> set[str]:
    """What persists and no task changes."""
    changed = {
        units.unit_of_leaf[leaf.leaf]
        for task in chain.tasks
        for leaves in units.touched(task).values()
        for leaf in leaves
        if leaf.makes
    }
    return {name for name, unit in units.units.items() if unit.persistent} - changed


def _placed(chain: Chain, units: UnitMap, level: str | None) -> RulePlacement:
    tasks = at_level(chain, level)
    at_home = HostContent.of(chain, units).units | _frozen(chain, units)
    made_at = {
        (leaf.leaf, leaf.makes): position
        for position, task in enumerate(tasks)
        for leaves in units.touched(task).values()
        for leaf in leaves
    }

    def keep(unit: Unit, before: int, after: int) -> bool:
        return unit.unit_id not in at_home

    residencies = chosen_residencies(device_uses(chain, tasks, units), units, keep, len(tasks))
    loads = sorted(
        {residency.begin for residency in residencies if units.units[residency.unit].persistent}
    )

    def with_copies(residency: Residency) -> Residency:
        """A load comes one layer ahead, a gradient leaves while the next layer is at work."""
        if residency.unit not in at_home:
            return residency
        if units.units[residency.unit].persistent:
            ahead = loads[max(0, bisect_left(loads, residency.begin) - 1)]
            read = [(leaf.leaf, leaf.reads) for leaf in residency.uses[0].leaves if leaf.reads]
            return replace(
                residency, begin=max([ahead, *(made_at.get(key, -1) + 1 for key in read)])
            )
        following = bisect_left(loads, residency.end) + 1
        return replace(residency, end=loads[following] if following < len(loads) else len(tasks))

    residencies = [with_copies(residency) for residency in residencies]
    return RulePlacement.of(chain, tasks, units, residencies)


def _synchronous(schedule: RankSchedule) -> RankSchedule:
    """The schedule whose first load of parameters waits for the whole update of the step before.

    All computing waits for that load. The update itself begins after the last gradient: that is
    the first one it reads.
    """
    roles = {tensor.tensor_id: tensor.role for tensor in schedule.tensors}
    updates = [
        op.op_id
        for op in schedule.ops
        if isinstance(op, Compute) and schedule.calls[op.call].processor == "host"
    ]
    loads = [
        i
        for i, op in enumerate(schedule.ops)
        if isinstance(op, Copy) and op.stream.queue == "h2d" and roles[op.tensor] == "parameter"
    ]
    if not updates or not loads:
        return schedule
    ops, first = list(schedule.ops), loads[0]
    waits = dict.fromkeys([*ops[first].waits_previous, updates[-1]])
    ops[first] = ops[first].model_copy(update={"waits_previous": tuple(waits)})
    return schedule.model_copy(update={"ops": tuple(ops)})
