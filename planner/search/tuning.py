"""Choose the knobs to try on a cut, each after what the attempts before have shown."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf

from twinstream.planner.choices import Choices, Home, PreferredHomes
from twinstream.planner.limits import SearchLimits
from twinstream.planner.rules.full_recompute import full_recompute_plan
from twinstream.planner.rules.optimizer_offload import optimizer_offload_plan
from twinstream.planner.rules.resident import resident_plan
from twinstream.planner.search.congestion import Shares, less_where_waited, scaled
from twinstream.planner.search.cut_planner import CutPlanner
from twinstream.planner.search.knobs import Attempt, Knobs

_AT_HOME: Mapping[str, Home] = {
    "parameter": "host", "gradient": "host", "optimizer_state": "host",
}  # fmt: skip
_BASE_RESIDENT: Mapping[str, Home] = {"parameter": "device"}
_LEAST_ROOM_BYTES = 2**20


def tuning_path(
    planner: CutPlanner, tried: Sequence[Attempt], best: Attempt | None
) -> Iterator[Knobs]:
    """Yield the knobs to try on one cut.

    Where all state fits the device, first the rules that keep it there. Then as much room for
    copies in flight as fits; then, where compute waited for copies, less of the links for the
    program beside those tasks, or less room where that costs more. Far from the bound, a short
    step is searched more widely.

    Args:
        planner: makes the plans of the cut.
        tried: the attempts so far; the caller adds one for every knobs it takes.
        best: the fastest of other cuts; what room was best there is tried first here.
    """
    limits, is_quick = planner.cuts.limits, planner.cuts.choices.effort == "quick"
    if planner.cuts.choices.open and planner.holds_all_state:
        on_host = bool(planner.small.made_on_host)
        for rule in (optimizer_offload_plan,) if on_host else (resident_plan, full_recompute_plan):
            yield replace(planner.first_knobs(planner.cuts.choices, 0), rule=rule)
            if is_quick and tried[-1].step_ns <= limits.far * _bound_ns(planner):
                return
        if min(a.step_ns for a in tried) <= limits.near * _bound_ns(planner):
            return
    for choices in _homes(planner, tried):
        yield from _first_that_fits(planner, choices, tried, best)
        fails = tried[-1].simulated is None or (
            best is not None and _is_hopeless(tried[-1], best, limits)
        )
        if fails and choices.homes == _BASE_RESIDENT:
            continue
        if fails or is_quick:
            return
        yield from _turns(planner, choices, tried)
    best = _best(tried)
    if best.step_ns <= limits.far * _bound_ns(planner):
        return
    if _is_short(planner):
        yield from _wider(planner, tried)
    elif best.knobs.room_bytes and _waits_ns(best) > _room_costs_ns(planner, best):
        more = 2 * best.knobs.room_bytes
        yield from _learned(planner, tried, lambda knobs: replace(knobs, room_bytes=more))


def _is_hopeless(turn: Attempt, best: Attempt, limits: SearchLimits) -> bool:
    """Whether a cut's first plan is clearly slower than the best of others, and is decided so."""
    decided_so = limits.near_equal * turn.relaxed_ns > best.step_ns
    return decided_so and turn.step_ns > limits.behind * best.step_ns


def fastest(tried: Iterable[Attempt]) -> Attempt | None:
    """Return the fastest attempt; None of none."""
    return min(tried, key=lambda attempt: attempt.step_ns, default=None)


def _fastest_ns(tried: Iterable[Attempt]) -> float:
    """Return the time of the fastest attempt; infinite where there is no plan."""
    return min((attempt.step_ns for attempt in tried), default=inf)


def _best(tried: Iterable[Attempt]) -> Attempt:
    """Return the fastest attempt that the program decided (no rule)."""
    return min((a for a in tried if a.knobs.rule is None), key=lambda attempt: attempt.step_ns)


def _homes(planner: CutPlanner, tried: Sequence[Attempt]) -> Iterator[Choices]:
    """Yield choices to plan with: state at home on the host where that costs little, or as given.

    The program may split what persists over both memories wherever that saves a copy; at home on
    the host it all takes turns on the device, which packs better than it bounds. So where plans of
    the one are far from the bound, the other is tried, too; and where a pass begins with updates,
    whose loads all queue up there. Not where the device has room for all.
    Then a frozen base may stay there whole: where that costs next to nothing it is planned so at
    first, since the program, which may move what is never written back, leaves links no slack.
    """
    limits, choices, room = planner.cuts.limits, planner.cuts.choices, planner.room_bytes()
    if choices.open and planner.holds_all_state and planner.cuts.is_frozen:
        base_resident = replace(choices, homes=_BASE_RESIDENT)
        if (
            planner.relaxed_s(base_resident, room)
            <= limits.near_equal * planner.relaxed_s(choices, room)
            < inf
        ):
            yield base_resident
            if _fastest_ns(tried) <= limits.near_equal * _bound_ns(planner):
                return
    at_home = PreferredHomes(_AT_HOME, choices.recompute, choices.prefetch_blocks, choices.effort)
    home_s = some_s = inf
    if choices.open and not planner.holds_all_state:
        for less in (room, room // limits.less_room, 0):
            home, some = (planner.relaxed_s(one, less) for one in (at_home, choices))
            if home < inf:
                home_s, some_s = home, some
                break
    if home_s <= limits.homes_cost * some_s < inf:
        yield at_home
        return
    yield choices
    best = fastest(tried)
    enough = limits.near if planner.small.begins_with_updates else limits.far
    if best is not None and enough * _bound_ns(planner) < best.step_ns > home_s * 1e9:
        yield at_home


def _first_that_fits(
    planner: CutPlanner, choices: Choices, tried: Sequence[Attempt], best: Attempt | None
) -> Iterator[Knobs]:
    """Yield knobs with ever less room for copies, at last without offloads into the next pass."""
    room = planner.room_bytes()
    rooms = [room, room // planner.cuts.limits.less_room, 0] if room else [0]
    updates_first = planner.small.begins_with_updates  # they need room, whatever others do with
    if best is not None and best.knobs.room_bytes < room and not updates_first:
        rooms.insert(0, best.knobs.room_bytes)
    for room in rooms:
        yield planner.first_knobs(choices, room)
        if tried[-1].simulated is not None or tried[-1].skipped:
            return
    if tried[-1].relaxed is not None:
        yield replace(planner.first_knobs(choices, 0), outlasting=False)


def _turns(planner: CutPlanner, choices: Choices, tried: Sequence[Attempt]) -> Iterator[Knobs]:
    """Yield knobs for further turns, each by what the one before showed; more while they gain."""
    limits, bound_ns = planner.cuts.limits, _bound_ns(planner)
    turns = limits.turns
    while (done := len(mine := _turns_with(choices, tried))) < turns:
        last, best = tried[-1], _best(mine)
        if last.simulated is None or best.step_ns <= limits.near * bound_ns:
            return
        if last is best and _less_room_pays(planner, last):
            room = last.knobs.room_bytes // limits.less_room
            yield replace(last.knobs, room_bytes=room if room > _LEAST_ROOM_BYTES else 0)
        else:
            changed = done > 1 and mine[-2].knobs.room_bytes != last.knobs.room_bytes
            turn = best if changed else last
            if (shares := _less_of_the_links(planner, turn)) is None:
                return
            yield replace(turn.knobs, shares=shares)
        if tried[-1].step_ns <= _best(mine).step_ns and tried[-1].step_ns > limits.far * bound_ns:
            turns = 2 * limits.turns


def _turns_with(choices: Choices, tried: Sequence[Attempt]) -> list[Attempt]:
    return [a for a in tried if a.simulated and not a.knobs.rule and a.knobs.choices == choices]


def _wider(planner: CutPlanner, tried: Sequence[Attempt]) -> Iterator[Knobs]:
    """Yield knobs of a wider search: more room, then less of the links, then what was learned.

    After each, copies get their time as it was simulated, while that helps.
    """
    limits, full = planner.cuts.limits, planner.full_shares
    first = _best(tried).knobs
    most = len(tried) + limits.wider_tasks // len(planner.few.chain.tasks)
    rooms = [(round(more * first.room_bytes), full) for more in limits.wider_rooms]
    less = [(None, scaled(full, share)) for share in limits.wider_shares]
    yield from _reclocked(planner, tried)
    for room, shares in (*rooms, *less):
        if len(tried) >= most:
            return
        best = _best(tried).knobs
        room = best.room_bytes if room is None else room
        yield replace(best, room_bytes=room, shares=shares, after=None)
        yield from _reclocked(planner, tried)
    yield from _learned(planner, tried, lambda knobs: knobs)


def _learned(
    planner: CutPlanner, tried: Sequence[Attempt], changed: Callable[[Knobs], Knobs]
) -> Iterator[Knobs]:
    """Yield less of the links where the best attempt waited for copies, while that is better."""
    for _ in range(2):
        best = _best(tried)
        if (shares := _less_of_the_links(planner, best)) is None:
            return
        yield changed(replace(best.knobs, shares=shares, after=None))
        if _best(tried) is best:
            return


def _reclocked(planner: CutPlanner, tried: Sequence[Attempt]) -> Iterator[Knobs]:
    """Yield the last attempt's decisions with time for copies as simulated, while it helps."""
    limits = planner.cuts.limits
    last = tried[-1]
    while last.simulated is not None and last.step_ns > limits.far * _bound_ns(planner):
        yield replace(last.knobs, after=last)
        if tried[-1].step_ns >= last.step_ns:
            return
        last = tried[-1]


def _less_room_pays(planner: CutPlanner, turn: Attempt) -> bool:
    """Whether the room left for copies costs much more than waiting for copies does."""
    if not turn.knobs.room_bytes:
        return False
    return _waits_ns(turn) < planner.cuts.limits.waits_per_room * _room_costs_ns(planner, turn)


def _waits_ns(turn: Attempt) -> float:
    """Return what waits for copies cost: the plan's time above that of its decisions."""
    return turn.step_ns - turn.relaxed_ns


def _room_costs_ns(planner: CutPlanner, turn: Attempt) -> float:
    """Return what room for copies costs: the time of the decisions above the bound."""
    return turn.relaxed_ns - _bound_ns(planner)


def _is_short(planner: CutPlanner) -> bool:
    """Whether the step has one round and few tasks, which simulate in no time."""
    tasks = len(planner.few.chain.tasks)
    return planner.num_rounds == 1 and tasks <= planner.cuts.limits.short_tasks


def _bound_ns(planner: CutPlanner) -> float:
    return planner.cut.bound.step_s * 1e9


def _less_of_the_links(planner: CutPlanner, turn: Attempt) -> Shares | None:
    simulated = turn.simulated
    assert simulated is not None, "only what was simulated waited"
    return less_where_waited(
        turn.knobs.shares,
        simulated.emitted.schedule,
        simulated.spans,
        (planner.few, planner.small),
        planner.cuts.limits,
    )
