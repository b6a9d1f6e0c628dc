"""Poison: what it fills, what it must leave alone, and that it exposes what is missing."""

import math

import pytest
import torch
from hypothesis import given, settings

from tests.helpers.plans import MACHINE, planned
from tests.helpers.runs import training
from tests.helpers.schedule_oracle import happens_before, waits_of
from tests.helpers.schedules import schedules
from tests.helpers.sketches import op, sketch
from tests.helpers.tiny_chains import small, tiny_chain
from twinstream.executor.backends.cpu import CpuBackend
from twinstream.executor.memory.arenas import POISON_BYTE, Arenas
from twinstream.executor.memory.poison import dying_content
from twinstream.executor.program.compiled import compile_program
from twinstream.executor.replay.dispatch import PassOptions, run_passes
from twinstream.executor.run.work import bind_works
from twinstream.executor.state.training_state import fill_carried, initial_state
from twinstream.planner.emit.waits import derive_waits
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.ops import Compute, Copy, Mode, Op, Operand, Stream
from twinstream.schedule.proof.accesses import Access, AccessMap
from twinstream.schedule.proof.memory_cells import GARBAGE
from twinstream.schedule.tensors import DEVICE, HOST, Carried, Slot, Tensor

SIZE = 256


def task(name: str, *uses: tuple[str, Mode], queue: str = "compute") -> Op:
    """A task that uses tensors in the device slots of their names."""
    found = op(name, queue)
    assert isinstance(found, Compute)
    operands = tuple(
        Operand(name=t, tensor=t, version=int(mode == "write"), mode=mode, slot=f"device.{t}")
        for t, mode in uses
    )
    return found.model_copy(update={"operands": operands})


def copy(name: str, tensor: str, source: str, destination: str) -> Copy:
    return Copy(
        op_id=name, stream=Stream(queue="h2d" if source == "host" else "d2h"), tensor=tensor,
        version=0, source=f"{source}.{tensor}", destination=f"{destination}.{tensor}",
    )  # fmt: skip


def drawn(*ops: Op, carried: tuple[str, ...] = ()) -> Schedule:
    """Tensors `a` to `d` with a slot in each tier, and the waits that their uses imply."""
    names = "abcd"
    tensors = tuple(
        Tensor(tensor_id=n, size_bytes=SIZE, role="activation", dtype="uint8", shape=(SIZE,))
        for n in names
    )
    slots = tuple(
        Slot(slot_id=f"{tier.kind}.{n}", tier=tier, offset_bytes=SIZE * i, size_bytes=SIZE)
        for tier in (DEVICE, HOST)
        for i, n in enumerate(names)
    )
    return sketch(
        derive_waits(tuple(ops), tensors, slots), tensors=tensors, slots=slots,
        carried=tuple(Carried(tensor=slot[-1], slot=slot) for slot in carried),
    )  # fmt: skip


# --- which op buries what


def test_content_dies_with_its_last_reader():
    schedule = drawn(task("make", ("a", "write")), task("use", ("a", "read")), task("later"))
    assert dying_content(schedule) == {"use": [("a", "device.a")]}


def test_content_that_nobody_reads_dies_with_its_maker():
    assert dying_content(drawn(task("make", ("a", "write")))) == {"make": [("a", "device.a")]}


def test_content_written_over_dies_before_with_its_last_reader():
    schedule = drawn(
        task("first", ("a", "write")), task("use", ("a", "read")), task("second", ("a", "write"))
    )
    assert dying_content(schedule) == {
        "use": [("a", "device.a")],
        "second": [("a", "device.a")],
    }


def test_an_update_goes_on_with_the_content():
    schedule = drawn(task("make", ("a", "write")), task("add", ("a", "update")), task("later"))
    assert dying_content(schedule) == {"add": [("a", "device.a")]}


def test_carried_content_lives_on():
    ops = [task("make", ("a", "write")), task("use", ("a", "read"))]
    assert dying_content(drawn(*ops, carried=("device.a",))) == {}


def test_content_that_a_pass_starts_with_is_left_alone():
    """Ops of the pass before may still read it."""
    schedule = drawn(
        copy("load", "a", "host", "device"),
        task("use", ("a", "read")),
        carried=("host.a",),
    )
    assert dying_content(schedule) == {"use": [("a", "device.a")]}


def test_content_with_a_reader_that_may_still_run_is_left_alone():
    schedule = drawn(
        task("make", ("a", "write")),
        copy("store", "a", "device", "host"),
        task("use", ("a", "read")),
        carried=("host.a",),
    )
    assert dying_content(schedule) == {}


def test_content_read_on_two_streams_dies_with_the_reader_that_waits_for_the_other():
    schedule = drawn(
        task("make", ("a", "write")),
        copy("store", "a", "device", "host"),
        copy("load", "a", "host", "device"),
        task("use", ("a", "read")),
        carried=("host.a",),
    )
    assert dying_content(schedule) == {
        "store": [("a", "device.a")],  # written over by `load`, which waits for `store`
        "use": [("a", "device.a")],
    }


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


def poisoned_run(schedule: Schedule) -> tuple[dict[str, torch.Tensor], Arenas, list[float]]:
    """One pass with poison and without the proofs; arenas afterwards."""
    memory = {
        tier: torch.zeros(size, dtype=torch.uint8) for tier, size in Arenas.sizes(schedule).items()
    }
    arenas = Arenas(schedule, memory)
    arenas.poison()
    fill_carried(schedule, arenas, initial_state(small("tiny"), seed=1))
    loop = training(schedule)
    works = bind_works(schedule, arenas, loop.host_work(schedule), poison=True)
    program = compile_program(schedule)
    run_passes(program, CpuBackend(program, works, 1), PassOptions(1))
    return {tier.kind: flat for tier, flat in memory.items()}, arenas, loop.losses


@pytest.fixture(scope="module", params=["resident", "streaming"])
def plan(request) -> Schedule:
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


def test_nearly_all_content_made_on_the_device_is_buried(plan):
    buried = {pair for pairs in dying_content(plan).values() for pair in pairs}
    made = {
        (o.tensor, o.slot)
        for found in plan.ops
        if isinstance(found, Compute)
        for o in found.operands
        if o.tensor.split(".")[0] in ("hidden", "attention", "projections", "kv", "d_hidden")
    }
    assert len(made & buried) > 0.9 * len(made)


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


def test_poison_is_nan_in_every_float_type_in_use():
    flat = torch.full((64,), POISON_BYTE, dtype=torch.uint8)
    for dtype in (torch.float32, torch.bfloat16):
        assert flat.view(dtype).isnan().all()
