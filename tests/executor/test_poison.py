"""Poison: what it fills, what it must leave alone, and that it exposes what is missing."""

import math

import pytest
import torch
from hypothesis import given, settings

from tests.helpers.plans import MACHINE, planned
from tests.helpers.runs import training
from tests.helpers.schedule_oracle import happens_before, waits_of
from tests.helpers.schedules import schedules
from tests.helpers.tiny_chains import small, tiny_chain
from twinstream.executor.backends.cpu import CpuBackend
from twinstream.executor.memory.arenas import POISON_BYTE, Arenas
from twinstream.executor.memory.poison import dying_content
from twinstream.executor.program.compiled import compile_program
from twinstream.executor.program.options import RunOptions
from twinstream.executor.replay.dispatch import PassOptions, run_passes
from twinstream.executor.run.work import bind_works
from twinstream.executor.state.training_state import fill_carried, initial_state
from twinstream.schedule.derived.waits import derive_waits
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.ops import Compute
from twinstream.schedule.proof.accesses import Access, AccessMap
from twinstream.schedule.proof.memory_cells import GARBAGE

# --- which op buries what


@given(schedules())
@settings(max_examples=100)
def test_what_is_buried_was_surely_used_before_and_is_never_read_again(pair):
    """Brute force over all bytes and two passes of random safe schedules."""
    schedule = pair[1]
    size = len(schedule.ops)
    access_map = AccessMap(schedule.tensors, schedule.slots)
    before = happens_before(schedule, waits_of(schedule), 2)
    touched: list[tuple[int, Access]] = [
        (number, access)
        for number in range(2 * size)
        for access in access_map.of(schedule.ops[number % size])
    ]
    carried = [access_map.ranges(item.tensor, item.slot, None) for item in schedule.carried]
    position = {o.op_id: i for i, o in enumerate(schedule.ops)}
    for op_id, contents in dying_content(schedule).items():
        for tensor, slot in contents:
            tier, ((low, high, _),) = access_map.ranges(tensor, slot, None)
            edges = {edge for _, a in touched for edge in (a.start, a.end) if low < edge < high}
            for byte in {low, *edges}:
                there = [
                    (n, a.mode) for n, a in touched if a.tier == tier and a.start <= byte < a.end
                ]
                for at in (position[op_id], position[op_id] + size):
                    assert all(n in before[at] for n, _ in there if n < at)
                    assert all(at in before[n] for n, _ in there if n > at)
                at = position[op_id]
                after = [(n, mode) for n, mode in there if n > at]
                assert not after or after[0][1] in ("write", "scratch")
                if not after or after[0][0] >= size:
                    assert not any(
                        home == tier and start <= byte < end and leaf != GARBAGE
                        for home, ranges in carried
                        for start, end, leaf in ranges
                    )


# --- poison at work


def poisoned_run(schedule: RankSchedule) -> tuple[dict[str, torch.Tensor], Arenas, list[float]]:
    """One pass with poison and without the proofs; arenas afterwards."""
    memory = {
        tier: torch.zeros(size, dtype=torch.uint8) for tier, size in Arenas.sizes(schedule).items()
    }
    arenas = Arenas(schedule, memory)
    arenas.poison()
    fill_carried(schedule, arenas, initial_state(small("tiny"), seed=1))
    loop = training(schedule)
    works = bind_works(schedule, arenas, loop.host_work(schedule), RunOptions(poison=True))
    program = compile_program(schedule)
    run_passes(program, CpuBackend(program, works), PassOptions(1))
    return {tier.kind: flat for tier, flat in memory.items()}, arenas, loop.losses


@pytest.fixture(scope="module", params=["resident", "streaming"])
def plan(request) -> RankSchedule:
    return planned(tiny_chain("packed"), MACHINE, Caps(), request.param)


def test_after_a_pass_all_that_is_not_carried_and_not_still_being_read_is_filled(plan):
    memory, arenas, losses = poisoned_run(plan)
    assert all(math.isfinite(loss) for loss in losses)
    device = memory["device"]
    carried = torch.zeros(len(device), dtype=torch.bool)
    for item in plan.carried:
        if item.slot.startswith("device"):
            view = arenas.view(item.tensor, item.slot)
            start = view.data_ptr() - device.data_ptr()
            carried[start : start + view.numel()] = True
    dead = device[~carried]
    assert (dead == POISON_BYTE).float().mean() > 0.9
    saved = [op for op in plan.ops if isinstance(op, Compute) and op.label.kind == "block_backward"]
    for operand in saved[-1].operands:
        if operand.name in ("attention", "projections", "kv"):
            assert (arenas.view(operand.tensor, operand.slot) == POISON_BYTE).all()


@pytest.mark.parametrize("lost", ["h2d.param.0.0", "h2d.tokens.0.0"])
def test_a_lost_load_shows_as_nan_or_as_an_impossible_token(plan, lost):
    """Without the load the bytes may hold the right content by chance; with poison never."""
    ops = [o for o in plan.ops if o.op_id != lost]
    if len(ops) == len(plan.ops):
        assert (plan.policy, lost) == ("resident", "h2d.param.0.0")
        return
    strip = {"waits": (), "waits_previous": ()}
    bare = tuple(o.model_copy(update=strip) for o in ops)
    damaged = plan.model_copy(update={"ops": derive_waits(bare, plan.tensors, plan.slots)})
    try:
        _, _, losses = poisoned_run(damaged)
    except IndexError:
        assert lost == "h2d.tokens.0.0"  # id 0xFFFFFFFF
    else:
        assert math.isnan(losses[0])
