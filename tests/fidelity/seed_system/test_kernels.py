"""Demands of the seed system's kernels: the same arithmetic as ours, more traffic."""

import pytest

from tests.helpers.seed_sizings import SIZINGS
from twinstream.fidelity.seed_system.kernels import with_its_kernels
from twinstream.fidelity.seed_system.policy import emit_seed, seed_chain
from twinstream.models.presets import load_preset
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.ops import KernelCall
from twinstream.schedule.workload import MachineRef

TINY = load_preset("tiny")


def both(name: str) -> tuple[RankSchedule, RankSchedule]:
    plan = SIZINGS[name]
    chain = seed_chain(TINY, plan.workload)
    schedule = emit_seed(TINY, chain, plan, MachineRef(name="h100", content_hash="0"))
    return schedule, with_its_kernels(schedule, TINY)


def flops(call: KernelCall, unit: str) -> int:
    return sum(work.flops for work in call.cost if work.unit == unit)


@pytest.mark.parametrize("name", ["one block of each", "sliced, few slots"])
@pytest.mark.parametrize("unit", ["matmul", "attention_forward", "attention_backward"])
def test_they_multiply_as_much_as_ours(name, unit):
    ours, theirs = both(name)
    wanted = {call_id: flops(call, unit) for call_id, call in ours.calls.items()}
    assert {call_id: flops(call, unit) for call_id, call in theirs.calls.items()} == wanted
    assert any(wanted.values())


def test_ops_and_bytes_stay():
    ours, theirs = both("an odd block")
    assert theirs.ops == ours.ops
    assert theirs.slots == ours.slots


def test_the_softmax_reads_the_logits_twice_and_writes_once():
    _, theirs = both("one block of each")
    (softmax,) = (w for w in theirs.calls["head_loss"].cost if w.unit == "cross_entropy")
    assert softmax.hbm_bytes == 3 * 64 * TINY.vocab_size * TINY.itemsize


def test_a_layers_backward_moves_what_its_kernels_name():
    """Two copies, two norms of 5 + 2, SwiGLU of 5 + 3, K and V copied and zeroed, RoPE in place."""
    _, theirs = both("one block of each")
    backward = theirs.calls["block_backward@0"].cost
    moved = sum(w.hbm_bytes for w in backward if not w.unit.startswith(("matmul", "attention")))
    d, f, q, k = TINY.d_model, TINY.d_ff, TINY.d_q, TINY.d_kv
    elements = (2 * 2 + 2 * 7) * d + 8 * f + 6 * k + 2 * (q + k)
    assert moved == 64 * elements * TINY.itemsize


def test_keys_and_values_are_copied_once_for_each_chunk():
    """By an op of the schedule where later chunks attend to them, else by the forward call."""
    _, theirs = both("sliced, few slots")
    copied = {
        call_id: any(work.unit == "vector" for work in call.cost)
        for call_id, call in theirs.calls.items()
        if call_id.startswith("block_forward")
    }
    assert copied == {
        "block_forward@0": False, "block_forward@32": False, "block_forward@64": True
    }  # fmt: skip
