"""How long copies took when a plan was judged: no more memory need be reserved for them."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from twinstream.planner.decide.margins import Allowances
from twinstream.planner.decide.task_sequence import TaskSequence
from twinstream.planner.emit.emission import Emitted
from twinstream.planner.lifetimes.rounds import Place
from twinstream.planner.lifetimes.stays import Stay, TaskClock
from twinstream.schedule.document import Schedule
from twinstream.schedule.ops import Compute, Copy
from twinstream.schedule.tensors import DEVICE
from twinstream.schedule.timeline import PassSpans


def judged_clock(schedule: Schedule, spans: PassSpans, pass_ns: float) -> TaskClock:
    """Each task from its start to the start of the next: of the last, in the pass after."""
    starts_ns = [
        start
        for op, start in zip(schedule.ops, spans.start_ns, strict=True)
        if isinstance(op, Compute)
    ]
    ends_ns = [*starts_ns[1:], starts_ns[0] + pass_ns]
    return TaskClock([end - start for start, end in zip(starts_ns, ends_ns, strict=True)])


def timed_stays(emitted: Emitted, spans: PassSpans, pass_ns: float) -> list[Stay]:
    """The stays of a placement without the time that their copies did not take.

    From the task during which the first load began, to the last one before the end of the last
    offload; never longer than they were.

    Args:
        emitted: its schedule.
        spans: of a pass.
        pass_ns: from one pass to the next.
    """
    schedule, stays = emitted.schedule, emitted.placement.stays
    compute = [i for i, op in enumerate(schedule.ops) if isinstance(op, Compute)]
    starts_ns = np.asarray([spans.start_ns[i] for i in compute])
    ends_ns = np.asarray([spans.end_ns[i] for i in compute])
    on_device = {slot.slot_id for slot in schedule.slots if slot.tier == DEVICE}
    starts_ns = np.concatenate([starts_ns, starts_ns + pass_ns])
    begins = [stay.uses[0].position for stay in stays]
    ends = [stay.uses[-1].position + 1 for stay in stays]
    for i, op in enumerate(schedule.ops):
        if not isinstance(op, Copy):
            continue
        stay = emitted.stay_of_copy[op.op_id]
        if op.destination in on_device:
            begin = int(np.searchsorted(ends_ns, spans.start_ns[i], side="right"))
            begins[stay] = min(begins[stay], begin)
        else:
            end = int(np.searchsorted(starts_ns, spans.end_ns[i], side="left"))
            ends[stay] = max(ends[stay], end)
    return [
        replace(
            stay,
            begin=stay.begin if stay.enters else max(begin, stay.begin),
            end=stay.end if stay.leaves else min(end, stay.end),
            later=min(stay.later, max(0, end - len(compute))),
        )
        for stay, begin, end in zip(stays, begins, ends, strict=True)
    ]


def timed_allowances(
    allowances: Allowances, sequence: TaskSequence, timed: Sequence[Stay]
) -> Allowances:
    """The allowances, but no more time for copies than the timed stays of the sequence have."""
    leads: dict[tuple[str, Place], int] = {}
    drains: dict[tuple[str, Place], int] = {}
    for stay in timed:
        first, last = stay.uses[0].position, stay.uses[-1].position
        used = stay.unit, sequence.place(first)
        leads[used] = max(leads.get(used, 0), first - stay.begin)
        used = stay.unit, sequence.place(last)
        drains[used] = max(drains.get(used, 0), stay.end + stay.later - last - 1)
    return Allowances({**allowances.leads, **leads}, {**allowances.drains, **drains})
