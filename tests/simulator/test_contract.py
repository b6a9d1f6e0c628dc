"""One schedule, two worlds: the executor on a virtual clock and the simulator agree to the ns."""

from collections.abc import Mapping
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.bodies import random_bodies
from tests.helpers.fixed_costs import FixedCosts
from tests.helpers.plans import planned
from tests.helpers.schedules import schedules
from tests.helpers.tiny_chains import tiny_chain
from tests.helpers.virtual_backend import VirtualBackend
from twinstream.executor.program.compiled import compile_program
from twinstream.executor.replay.dispatch import PassOptions, run_passes
from twinstream.hardware_profiles.loader import load_machine
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.timeline import PassSpans
from twinstream.simulator.replay import replay_passes


def durations_ns(schedule: RankSchedule, seed: int) -> dict[str, int]:
    """Many are zero and many alike, so that ops tie."""
    rng = Random(seed)
    return {o.op_id: rng.choice([0, 0, 1, 1, 2, 5, 1000]) for o in schedule.ops}


def in_both_worlds(
    schedule: RankSchedule, durations: Mapping[str, int], wait_ns: int, num_passes: int
) -> tuple[list[PassSpans], list[PassSpans]]:
    """(executed, simulated)."""
    program = compile_program(schedule)
    clock = VirtualBackend(program, lambda o: durations[o.op_id], wait_ns)
    costs = FixedCosts(lambda o: durations[o.op_id], wait_ns)
    passes = run_passes(program, clock, PassOptions(num_passes)).times
    executed = [found.spans for found in passes if found.spans is not None]
    return executed, replay_passes(schedule, costs, num_passes)


SEEDS = st.integers(0, 2**32)
WAITS_NS = st.sampled_from([0, 1, 7])
PASSES = st.integers(1, 5)


@given(random_bodies(), SEEDS, WAITS_NS, PASSES)
@settings(max_examples=300)
def test_random_bodies_run_the_same_in_both_worlds(schedule, seed, wait_ns, num_passes):
    durations = durations_ns(schedule, seed)
    executed, simulated = in_both_worlds(schedule, durations, wait_ns, num_passes)
    assert executed == simulated


@given(schedules(), SEEDS, WAITS_NS, PASSES)
def test_safe_schedules_run_the_same_in_both_worlds(pair, seed, wait_ns, num_passes):
    durations = durations_ns(pair[1], seed)
    executed, simulated = in_both_worlds(pair[1], durations, wait_ns, num_passes)
    assert executed == simulated


@pytest.mark.parametrize("policy", ["resident", "streaming", "optimal"])
def test_planned_schedules_run_the_same_in_both_worlds(policy):
    schedule = planned(tiny_chain("sliced"), load_machine("cpu"), Caps(), policy)
    durations = durations_ns(schedule, seed=1)
    executed, simulated = in_both_worlds(schedule, durations, 3, 4)
    assert executed == simulated
    assert executed[-1].start_ns != executed[0].start_ns


@given(random_bodies(), SEEDS, WAITS_NS, PASSES)
def test_ops_start_when_predecessor_and_waits_have_completed(schedule, seed, wait_ns, num_passes):
    """Both worlds against the sentence of the design page, op by op."""
    durations = durations_ns(schedule, seed)
    _, simulated = in_both_worlds(schedule, durations, wait_ns, num_passes)
    position = {o.op_id: i for i, o in enumerate(schedule.ops)}
    free: dict[str, int] = {}
    for number, spans in enumerate(simulated):
        for i, found in enumerate(schedule.ops):
            waits = [spans.end_ns[position[w]] for w in found.waits]
            if number:
                before = simulated[number - 1]
                waits += [before.end_ns[position[w]] for w in found.waits_previous]
            start = max([free.get(str(found.stream), 0), *waits]) + (wait_ns if waits else 0)
            assert spans.start_ns[i] == start
            assert spans.end_ns[i] == start + durations[found.op_id]
            free[str(found.stream)] = spans.end_ns[i]
