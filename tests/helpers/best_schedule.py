"""Brute force: the fastest schedule of a small chain, by trying residencies and copy orders.

A residency says for every gap between two uses whether the content stays or is reloaded, and which
recomputes run. For each, loads are issued at all positions from where the content is on the host to
where it is due (cyclically), offloads at all positions from where it is final, in all orders. Slots
are shared by whole tensors whose times, in issue order, do not meet; the waits are those that this
implies. The simulator times each; no period is below the sum of what a residency computes and
copies, so residencies are tried in that order until none can be better.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain as concatenated
from itertools import permutations, product

from tests.helpers.small_layouts import CopyOf, Layout, made_at
from tests.helpers.small_residencies import (
    OPEN_HOMES,
    Homes,
    Residency,
    residencies,
    uses_of,
)
from twinstream.hardware_profiles.cost import cost_alone_ns
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.simulator.replay import simulate_rank

_SAME = 1e-9


@dataclass(frozen=True)
class Found:
    step_ns: float
    schedule: RankSchedule
    num_simulated: int


def best_schedule(
    chain: Chain,
    machine: Machine,
    caps: Caps,
    *,
    most: int = 30,
    good_ns: float = 0.0,
    homes: Homes = OPEN_HOMES,
) -> Found | None:
    """The fastest schedule found within `most` simulations, or until one is as fast as `good_ns`.

    `homes`: by tensor, where it is at home, if that is fixed. None where whole tensors do not fit
    the caps.
    """
    least = sorted(
        (
            (_least_ns(chain, machine, found), n, found)
            for n, found in enumerate(residencies(chain, homes))
        ),
        key=lambda item: item[:2],
    )
    best: tuple[float, RankSchedule] | None = None
    simulated = 0
    for least_ns, _, residency in least:
        for schedule in schedules(chain, machine, caps, residency):
            if simulated >= most or (best is not None and least_ns >= best[0] * (1 - _SAME)):
                break
            timeline = simulate_rank(schedule, machine)
            simulated += 1
            if timeline.period_passes is None:
                continue
            if best is None or timeline.step_ns < best[0]:
                best = timeline.step_ns, schedule
            if best[0] <= good_ns:
                return Found(*best, simulated)
    return None if best is None else Found(*best, simulated)


def _least_ns(chain: Chain, machine: Machine, residency: Residency) -> float:
    """What computing and copying take at the least, if everything overlaps."""
    sizes = {t.tensor_id: t.size_bytes for t in chain.tensors}
    load = sum(sizes[s.tensor] for s in residency.stays if s.load is not None)
    store = sum(sizes[h.tensor] for h in residency.homes if h.stored_by is not None)
    calls = [chain.calls[task.call] for task in residency.steps]
    hbm = sum(work.hbm_bytes for call in calls for work in call.cost)
    times = [
        load / machine.rate("pcie_h2d_bytes_per_s"),
        store / machine.rate("pcie_d2h_bytes_per_s"),
        (load + store) / machine.rate("pcie_duplex_bytes_per_s"),
        (load + store) / machine.rate("host_dram_bytes_per_s"),
        (load + store + hbm) / machine.rate("hbm_bytes_per_s"),
    ]
    return max(sum(cost_alone_ns(call.cost, machine) for call in calls), 1e9 * max(times))


def schedules(
    chain: Chain, machine: Machine, caps: Caps, residency: Residency
) -> Iterator[RankSchedule]:
    """All schedules of a residency that fit the caps, those that load and store early first.

    One whose copies are all issued later than those of a schedule that fits, in the same order,
    is left out.
    """
    earlier: list[tuple[int, ...]] = []
    for lateness, copies in _placements(residency):
        if any(all(a <= b for a, b in zip(e, lateness, strict=True)) for e in earlier):
            continue
        if not _fits_at_steps(chain, residency, copies, caps):
            continue
        fits = False
        for order in _orders(residency, copies):
            schedule = Layout(chain, residency, order).schedule(machine, caps)
            if schedule is not None:
                fits = True
                yield schedule
        if fits:
            earlier.append(lateness)


def _placements(residency: Residency) -> list[tuple[tuple[int, ...], list[CopyOf]]]:
    """All choices of steps before which to issue each copy, with how late each copy is."""
    num_steps = len(residency.steps)
    ranges: list[list[tuple[int, CopyOf]]] = []
    for number, home in enumerate(residency.homes):
        for stay in home.loaded_by:
            due = residency.stays[stay].uses[0].step
            begin = _use_before(residency, stay)
            span = (due - begin - 1) % num_steps
            ranges.append(
                [
                    (late, CopyOf(stay, number, True, (begin + 1 + late) % num_steps))
                    for late in range(span + 1)
                ]
            )
        if home.stored_by is not None:
            ranges.append(_store_range(residency, number, home.stored_by))
    picks = [
        (tuple(late for late, _ in pick), [copy for _, copy in pick]) for pick in product(*ranges)
    ]
    return sorted(picks, key=lambda pick: sum(pick[0]))


def _fits_at_steps(
    chain: Chain, residency: Residency, copies: Sequence[CopyOf], caps: Caps
) -> bool:
    """Whether what is alive at each step fits, in whatever order the copies between steps are."""
    cap = caps.arena_bytes("device")
    if cap is None:
        return True
    num_steps = len(residency.steps)
    sizes = {t.tensor_id: t.size_bytes for t in chain.tensors}
    loads = {copy.stay: copy.before for copy in copies if copy.loads}
    alive = [
        sum(sizes[o.tensor] for o in task.operands if o.mode == "scratch")
        for task in residency.steps
    ]
    for number, stay in enumerate(residency.stays):
        begin = loads.get(number, stay.uses[0].step)
        ends = [use.step for use in stay.uses]
        ends += [c.before - 1 for c in copies if c.stay == number and not c.loads]
        length = max((end - begin) % num_steps for end in ends)
        for step in range(num_steps if stay.whole_cycle else length + 1):
            alive[(begin + step) % num_steps] += sizes[stay.tensor]
    return max(alive) <= cap


def _use_before(residency: Residency, stay: int) -> int:
    """Step of the use before the gap that a stay's load ends."""
    tensor, load = residency.stays[stay].tensor, residency.stays[stay].load
    assert load is not None
    return uses_of(residency.steps, tensor)[load].step


def _store_range(residency: Residency, home: int, stay: int) -> list[tuple[int, CopyOf]]:
    """A store goes right after the content is made, or later in the pass, up to the first load."""
    num_steps = len(residency.steps)
    made = made_at(residency.stays[stay])
    uses = uses_of(residency.steps, residency.stays[stay].tensor)
    first_due = min(
        ((residency.stays[s].uses[0].step - made - 1) % num_steps)
        for s in residency.homes[home].loaded_by
    )
    last = first_due if len(uses) > 1 else num_steps - 1
    return [
        (late, CopyOf(stay, home, False, (made + 1 + late) % num_steps))
        for late in range(min(last, num_steps - 1 - made) + 1)
    ]


def _orders(residency: Residency, copies: Sequence[CopyOf]) -> Iterator[list[CopyOf]]:
    """Copies in all orders at each step: stores first, then those due first, to begin with."""
    num_steps = len(residency.steps)

    def rank(copy: CopyOf) -> tuple[bool, int]:
        first_use = residency.stays[copy.stay].uses[0].step
        return copy.loads, (first_use - copy.before) % num_steps

    groups = [
        sorted((c for c in copies if c.before == step), key=rank)
        for step in [*range(1, num_steps), 0]
    ]
    for picks in product(*(permutations(group) for group in groups)):
        yield list(concatenated.from_iterable(picks))
