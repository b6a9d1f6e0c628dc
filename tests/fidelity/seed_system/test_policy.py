"""The seed system's schedule: proven safe, and in the order in which it issues."""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from tests.helpers.fixed_costs import FixedCosts
from tests.helpers.seed_sizings import LAYERS, SIZINGS, sizing, sliced
from twinstream.fidelity.seed_system.policy import COMPUTE, emit_seed, seed_chain, timed_ns
from twinstream.fidelity.seed_system.sizing import Sizing
from twinstream.models.lowering import declarations
from twinstream.models.presets import load_preset
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.ops import Copy, Op
from twinstream.schedule.proof.conforms import conforms
from twinstream.schedule.proof.verify import verify_rank
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE, HOST
from twinstream.schedule.timeline import PassSpans
from twinstream.schedule.workload import MachineRef
from twinstream.simulator.replay import replay_passes

TINY = load_preset("tiny")
MACHINE = MachineRef(name="h100", content_hash="0")


@cache
def planned(plan: Sizing) -> tuple[Chain, RankSchedule]:
    chain = seed_chain(TINY, plan.workload)
    return chain, emit_seed(TINY, chain, plan, MACHINE)


def scheduled(plan: Sizing) -> RankSchedule:
    return planned(plan)[1]


def copies(schedule: RankSchedule, queue: str) -> list[Copy]:
    return [op for op in schedule.ops if isinstance(op, Copy) and op.stream.queue == queue]


def between_tasks(schedule: RankSchedule, first: str, past: str) -> list[Op]:
    ids = [op.op_id for op in schedule.ops]
    return list(schedule.ops[ids.index(first) : ids.index(past)])


def by_id(schedule: RankSchedule) -> dict[str, Op]:
    return {op.op_id: op for op in schedule.ops}


@pytest.mark.parametrize("name", SIZINGS)
def test_the_schedule_is_safe_and_computes_the_chain(name):
    chain, schedule = planned(SIZINGS[name])
    assert verify_rank(schedule) == []
    assert conforms(schedule, chain) == []


def test_layers_in_parts_are_updated_part_after_part(monkeypatch):
    monkeypatch.setattr(declarations, "_LARGEST_PART_BYTES", 32 << 10)
    plan = next(iter(SIZINGS.values()))
    chain = seed_chain(TINY, plan.workload)
    assert any(".part" in t.task_id for t in chain.tasks if t.label.layer is not None)
    schedule = emit_seed(TINY, chain, plan, MACHINE)
    assert verify_rank(schedule) == [] == conforms(schedule, chain)


@pytest.mark.parametrize("name", SIZINGS)
def test_a_pass_starts_when_all_queues_are_through_with_the_one_before(name):
    schedule = scheduled(SIZINGS[name])
    first, second = replay_passes(schedule, FixedCosts(lambda op: 1 + len(op.op_id)), 2)
    assert max(first.end_ns) <= min(second.start_ns)


def test_gradients_come_back_every_round_even_if_all_layers_fit():
    schedule = scheduled(SIZINGS["all on the device"])
    grads = Counter(op.op_id.rsplit(".", 1)[0] for op in schedule.ops if ".grad." in op.op_id)
    # Three rounds: home after the first two, back before the last two.
    assert grads == {f"{way}.grad.{k}": 2 for way in ("h2d", "d2h") for k in range(LAYERS)}


def test_a_middle_round_moves_what_the_rules_say():
    plan = SIZINGS["an odd block"]
    schedule = scheduled(plan)
    sizes = {t.tensor_id: t.size_bytes for t in schedule.tensors}
    layer = sizes["param.0"]
    ops = between_tasks(schedule, "feed.tokens.0.2", "feed.tokens.0.3")
    moved: Counter[str] = Counter()
    for op in ops:
        if isinstance(op, Copy) and op.stream != COMPUTE and "tokens" not in op.tensor:
            moved[op.stream.queue] += sizes[op.tensor]
    # Activation 0 is saved at ATTENTION, activation 1 at FULL.
    acts = sum(sizes[f"{unit}.{k}.0"] for unit in ("input", "kv", "attention") for k in (0, 1))
    acts += sizes["projections.1.0"]
    absent = LAYERS - plan.param_blocks
    assert moved == {
        "h2d": 2 * absent * layer + LAYERS * layer + acts,
        "d2h": LAYERS * layer + acts,
    }


def test_the_optimizer_moves_what_the_rules_say():
    plan = SIZINGS["an odd block"]
    schedule = scheduled(plan)
    ids = [op.op_id for op in schedule.ops]
    after = schedule.ops[ids.index("r2.embed_backward.0") :]
    moved = Counter(op.op_id.rsplit(".", 1)[0] for op in after if isinstance(op, Copy))
    loaded = {"opt": range(LAYERS), "param": [3, 0], "grad": [2, 3]}  # layer 0 is fetched again
    wanted = {f"h2d.{kind}.{k}" for kind, layers in loaded.items() for k in layers}
    wanted |= {f"d2h.{kind}.{k}" for kind in ("param", "opt") for k in range(LAYERS)}
    wanted |= {"d2h.param.embedding", "d2h.param.head"}
    assert moved == dict.fromkeys(wanted, 1)


def test_gradients_wait_in_the_inbound_queue_for_the_copy_out_of_their_block():
    schedule = scheduled(SIZINGS["one block of each"])
    ops = by_id(schedule)
    assert "d2h.grad.3.1" in ops["h2d.grad.2.0"].waits
    inbound = [op.op_id for op in copies(schedule, "h2d")]
    # What comes next is behind it: the activation that the layer below frees.
    assert inbound.index("h2d.grad.2.0") < inbound.index("h2d.input.1.0.1")


def test_a_layers_backward_begins_with_its_recompute_when_its_gradients_block_is_ready():
    ops = by_id(scheduled(SIZINGS["one block of each"]))
    # Levels FAI: layers 1 and 2 are recomputed. In round 0 the block is ready once it is free.
    assert "d2h.grad.2.0" in ops["r0.block.1.0.recompute.ATTENTION"].waits
    assert "h2d.grad.1.0" in ops["r1.block.1.0.recompute.ATTENTION"].waits


def test_gradients_are_fetched_before_the_parameters_below():
    schedule = scheduled(SIZINGS["one block of each"])
    issued = between_tasks(schedule, "r1.block_backward.3.0", "r1.block.2.0.recompute.INPUT")
    inbound = [op.op_id for op in issued if str(op.stream) == "0:h2d"]
    grads = [name for name in inbound if name.startswith("h2d.grad")]
    params = [name for name in inbound if name.startswith("h2d.param")]
    assert len(grads) == len(params) == 1
    assert inbound.index(grads[0]) < inbound.index(params[0])


def test_adam_state_comes_in_when_the_last_round_is_through_and_takes_the_place_of_scratch():
    schedule = scheduled(replace(SIZINGS["all on the device"], num_optimizer_blocks=4))
    last = next(op.op_id for op in reversed(schedule.ops) if op.op_id.startswith("r2."))
    assert last in by_id(schedule)["h2d.opt.0.0"].waits
    slots = {slot.slot_id: slot for slot in schedule.slots}
    scratch, first = slots["device.scratch"], slots["device.opt.block0"]
    last_param = slots["device.grad.block3"]
    assert first.offset_bytes < scratch.offset_bytes
    assert first.offset_bytes >= last_param.offset_bytes + last_param.size_bytes


def test_an_update_waits_for_the_copies_out_of_the_layer_before():
    ops = by_id(scheduled(SIZINGS["all on the device"]))
    for layer in range(1, LAYERS):
        assert f"d2h.opt.{layer - 1}.0" in ops[f"optimizer.{layer}"].waits
    loads = by_id(scheduled(SIZINGS["an odd block"]))
    assert "d2h.opt.0.0" in loads["h2d.param.3.3"].waits


def test_an_activation_waits_for_its_slot_to_be_copied_out():
    # Two slots: activation 2 takes the slot of activation 0, with a copy of its input first.
    ops = by_id(scheduled(sizing("FF", params=4, grads=4)))
    assert "d2h.input.0.0.0" in ops["compute.hidden.2.0.0"].waits
    assert ops["r0.block_forward.2.0"].waits[0] in ("d2h.kv.0.0.0", "d2h.projections.0.0.0")


@pytest.mark.parametrize(
    ("name", "second_queue"),
    [("sliced, few slots", True), ("sliced, as many slots as chunks", True),
     ("sliced, more slots", False), ("sliced, all on the device", False)],
)  # fmt: skip
def test_context_that_is_not_on_the_device_has_an_inbound_queue_of_its_own(name, second_queue):
    schedule = scheduled(SIZINGS[name])
    assert bool(copies(schedule, "h2d_context")) == second_queue


def test_what_is_timed_ends_with_the_last_copy_out():
    schedule = scheduled(sliced("IAIAIA", params=2, grads=2))
    starts = [10 * i for i in range(len(schedule.ops))]
    spans = PassSpans(start_ns=tuple(starts), end_ns=tuple(s + 5 for s in starts))
    begin = next(i for i, op in enumerate(schedule.ops) if op.stream == COMPUTE)
    end = max(i for i, op in enumerate(schedule.ops) if op.stream.queue == "d2h")
    assert schedule.ops[-1].op_id.startswith("h2d.param.")  # fetched again, and not timed
    assert timed_ns(schedule, spans) == 10 * end + 5 - 10 * begin


def test_memory_that_no_op_uses_is_reserved():
    plan = SIZINGS["an odd block"]
    bare = scheduled(plan)
    ends = {tier: arena_bytes(bare, tier) for tier in (DEVICE, HOST)}
    used = {"used_device_bytes": ends[DEVICE] + 5000, "used_host_bytes": ends[HOST] + 7000}
    schedule = emit_seed(TINY, planned(plan)[0], replace(plan, **used), MACHINE)
    assert arena_bytes(schedule, DEVICE) == ends[DEVICE] + 5000
    assert arena_bytes(schedule, HOST) == ends[HOST] + 7000
    assert schedule.ops == bare.ops
    assert verify_rank(schedule) == []
