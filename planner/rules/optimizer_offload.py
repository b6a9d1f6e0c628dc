"""`optimizer_offload`: as ZeRO-Offload, the optimizer and its state on the host CPU."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from twinstream.hardware_profiles.cost import call_alone_ns, copy_alone_ns
from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.emit.emission import Emitted, emitted
from twinstream.planner.emit.unrolling import repeated
from twinstream.planner.lifetimes.host_tasks import HostContent, device_uses
from twinstream.planner.lifetimes.recomputes import at_level, declared_levels
from twinstream.planner.lifetimes.residencies import Residency, TaskClock, unbroken_residencies
from twinstream.planner.lifetimes.uses import UnitMap
from twinstream.planner.rules.fitting import RulePlacement, first_fitting
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, RankSchedule


def plan_optimizer_offload(chain: Chain, machine: Machine, caps: Caps) -> RankSchedule:
    """Parameters, gradients and activations on the device; optimizer state and AdamW on the host.

    Models ZeRO-Offload on one device. Gradients accumulate on the device and go to the host as
    soon as they are final, in the last round; the host updates each group when its gradients are
    there, and the updated parameters are copied into their places on the device. With one round
    a gradient's bytes go to others soon after its copy, as the paper's buffers do. Saved
    activations stay on the device: all of them if they fit, else every block is recomputed from
    its input.

    Kinder than the paper: the update of a group starts under the rest of the backward pass, which
    a global gradient norm or an overflow check would forbid. Left out: the one-step delayed
    update (it changes the results), float32 master parameters and state (ours have the
    parameters' dtype), and the host's conversions between dtypes.

    Source: Ren et al., ZeRO-Offload: Democratizing Billion-Scale Model Training,
    arXiv:2101.06840, sections 3 and 4.

    Raises:
        InfeasiblePlan: a cap is too small; it says what would do, in bytes.
        MissingNumberError: the profile lacks a number of the host CPU.
    """
    return repeated(partial(optimizer_offload_plan, machine=machine, caps=caps), chain)


def optimizer_offload_plan(chain: Chain, machine: Machine, caps: Caps) -> Emitted:
    """The same with the rounds that the chain has, for all updates or some on the host."""
    placement = first_fitting("optimizer_offload", caps, _placements(chain, machine))
    return emitted(placement, machine, caps, "optimizer_offload")


def _placements(chain: Chain, machine: Machine) -> Iterator[RulePlacement]:
    """Without recompute first; bytes of gradients on their way to the host are kept if they may."""
    units = UnitMap(chain)
    for level in (None, *declared_levels(chain)[-1:]):
        for copies_ahead in (2, 0):
            yield _placed(chain, machine, units, level, copies_ahead)


def _placed(
    chain: Chain, machine: Machine, units: UnitMap, level: str | None, copies_ahead: int
) -> RulePlacement:
    tasks = at_level(chain, level)
    clock = TaskClock([call_alone_ns(chain.calls[task.call], machine) for task in tasks])
    sent = {leaf for leaf, _ in HostContent.of(chain, units).reads}

    def drained(residency: Residency) -> Residency:
        unit = units.units[residency.unit]
        if residency.leaves or sent.isdisjoint(unit.leaves):
            return residency
        copy_ns = copy_alone_ns(unit.tensor.size_bytes, "d2h", machine)
        end = clock.position_after(residency.uses[-1].position, copies_ahead * copy_ns)
        return replace(residency, end=min(end, len(tasks)))

    residencies = unbroken_residencies(device_uses(chain, tasks, units), units, len(tasks))
    if copies_ahead:
        residencies = [drained(residency) for residency in residencies]
    return RulePlacement.of(chain, tasks, units, residencies)
