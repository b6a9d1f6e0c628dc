"""Counts of a run against arithmetic by hand."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import twinstream as ts
from twinstream.cost.bill import CostError
from twinstream.cost.work import (
    BatchWork,
    CountedRun,
    PassWork,
    WorkAxis,
    counted_sizes,
    micro_batch_sizes,
    work_of,
)
from twinstream.models.presets import load_preset

LAYERS, WIDTH, INNER, HEADS, HEAD, TOKENS, SEQUENCES, STEPS = 4, 256, 512, 8, 32, 64, 16, 10
DENSE = CountedRun(
    num_layers=LAYERS, d_model=WIDTH, d_ff=INNER, num_heads=HEADS, head_dim=HEAD,
    batch_size=SEQUENCES, seq_len=TOKENS, dataset_tokens=SEQUENCES * TOKENS * STEPS,
)  # fmt: skip
HIDDEN = LAYERS * SEQUENCES * TOKENS * WIDTH * STEPS  # values between layers, of the run
ROOT = {"num_layers": 12, "d_model": 1024, "d_ff": 4096, "num_heads": 16, "dataset_tokens": 1e10}


def with_sizes(run: CountedRun = DENSE, **sizes: object) -> CountedRun:
    return run.model_copy(update=sizes)


def cost(run: CountedRun = DENSE, **sizes: object) -> SimpleNamespace:
    """FLOPs, and values of all axes, of both passes."""
    found = work_of(with_sizes(run, **sizes))
    return SimpleNamespace(
        flop_fwd=found.forward.flop, flop_bwd=found.backward.flop,
        **{f"{way}_{name}": sum(getattr(work, way).values()) for way in ("sent", "received")
           for name, work in (("fwd", found.forward), ("bwd", found.backward))},
        found=found,
    )  # fmt: skip


def along(cost: SimpleNamespace, axis: WorkAxis) -> SimpleNamespace:
    forward = cost.found.forward
    return SimpleNamespace(sent_fwd=forward.sent[axis], received_fwd=forward.received[axis])


def busy(cost: SimpleNamespace) -> set[str]:
    forward, backward = cost.found.forward, cost.found.backward
    return {axis for axis in WorkAxis if forward.sent[axis] or backward.received[axis]}


def test_flop_of_a_dense_model_on_one_device_are_a_product_and_an_addition_each():
    tokens, width = SEQUENCES * TOKENS, HEADS * HEAD
    project = 2 * WIDTH - 1  # for each output
    queries = tokens * width * project
    keys_values = 2 * tokens * HEAD * project
    scores = tokens * HEADS * TOKENS * (2 * HEAD - 1)
    softmax = tokens * HEADS * (TOKENS - 1) + tokens * HEADS * TOKENS
    weighted = tokens * width * (2 * TOKENS - 1)
    output = tokens * WIDTH * HEADS * (2 * HEAD - 1)  # not yet summed over heads
    inner = tokens * INNER * project
    outer = tokens * WIDTH * INNER
    residual = tokens * WIDTH * (HEADS + INNER - 1)
    layer = queries + keys_values + scores + softmax + weighted + output + inner + outer + residual
    found = cost()
    assert found.flop_fwd == LAYERS * STEPS * layer
    assert busy(found) == set()


def test_replicas_move_weights_and_gradients_once_a_batch_and_nothing_else():
    found = cost(data=4)
    weights = DENSE.num_params * STEPS
    assert busy(found) == {WorkAxis.DATA}
    assert found.sent_fwd == weights  # each value to all at once
    assert found.received_fwd == 3 * weights
    assert found.sent_bwd == found.received_bwd == 3 * weights
    assert found.flop_bwd == cost().flop_bwd + 3 * DENSE.num_params * STEPS


def test_stages_hand_on_what_is_between_layers():
    found = cost(pipe=4)
    handed_on = HIDDEN * 3 / LAYERS
    assert busy(found) == {WorkAxis.PIPE}
    assert found.sent_fwd == pytest.approx(handed_on)
    assert found.received_bwd == pytest.approx(handed_on)


def test_parts_of_the_inner_width_sum_the_output_of_a_layer():
    found = along(cost(tensor_int=4, data=1), WorkAxis.TENSOR_INTERNAL)
    gathered = 2 * LAYERS * WIDTH * HEAD * STEPS  # keys' and values' weights, for all heads
    assert found.sent_fwd == HIDDEN * (3 + 1) + gathered
    assert found.received_fwd == HIDDEN * (3 + 3) + 3 * gathered


def test_tokens_go_to_other_experts_as_often_as_those_are_elsewhere():
    found = along(cost(num_experts=4, exp=4), WorkAxis.EXPERT)
    keys_values = 2 * LAYERS * SEQUENCES * TOKENS * HEAD * STEPS
    assert found.sent_fwd == HIDDEN * 3 / 4 + keys_values
    assert found.received_fwd == HIDDEN * 3 / 4 + 3 * keys_values


def test_recompute_adds_the_forward_to_the_backward():
    plain, twice = cost(tensor_int=2), cost(tensor_int=2, recompute=True)
    assert twice.flop_fwd == plain.flop_fwd
    assert twice.flop_bwd == plain.flop_bwd + plain.flop_fwd
    sent = plain.sent_bwd + plain.sent_fwd
    assert twice.sent_bwd == sent


def test_parameters_of_each_kind_of_layer():
    attention, network = 2 * (HEADS + 1) * HEAD, 2 * INNER
    assert DENSE.num_params == LAYERS * WIDTH * (attention + network)
    full = with_sizes(num_kv_heads=HEADS, gated=True, num_experts=3)
    assert full.num_params == 3 * LAYERS * WIDTH * (4 * HEADS * HEAD + 3 * INNER)


_SHARES = st.floats(0, 0.5)
_DEGREES = st.sampled_from((1, 2, 4, 8))


@given(_DEGREES, _DEGREES, _SHARES, _SHARES)
def test_shares_of_axes_add_up_to_the_whole(outer, inner, one, other):
    batch = BatchWork(with_sizes(data=outer, tensor_int=inner))
    batch.forward, batch.backward = PassWork(), PassWork()
    crossings = {WorkAxis.PIPE: one, WorkAxis.EXPERT: other}
    batch.spread("LDK", WorkAxis.TENSOR_INTERNAL, WorkAxis.DATA, crossings=crossings)
    values, parts, moved = LAYERS * WIDTH * HEAD, inner * outer, one + other
    lacking = values * (parts - 1 + moved)
    assert sum(batch.forward.sent.values()) == pytest.approx(values * (1 if parts > 1 else moved))
    assert sum(batch.forward.received.values()) == pytest.approx(lacking)
    assert sum(batch.backward.sent.values()) == pytest.approx(lacking)
    assert batch.backward.flop == pytest.approx(lacking)


def test_steps_by_hand():
    batch = BatchWork(with_sizes(data=4))
    batch.forward, batch.backward = PassWork(), PassWork()
    batch.add_up("BL", "B")  # four devices have a quarter of 16 sequences each
    assert batch.forward.flop == LAYERS * (SEQUENCES - 1)
    assert batch.forward.sent[WorkAxis.DATA] == batch.forward.received[WorkAxis.DATA] == 3 * LAYERS
    assert batch.backward.sent[WorkAxis.DATA] == LAYERS
    assert batch.backward.received[WorkAxis.DATA] == 3 * LAYERS
    before = batch.forward.flop
    batch.multiply("BLK")
    assert batch.forward.flop - before == SEQUENCES * LAYERS * HEAD
    assert batch.backward.flop == 4 * SEQUENCES * LAYERS * HEAD


def test_micro_batches_are_those_that_divide_the_batch_and_keep_devices_busy():
    wide = CountedRun(
        num_layers=4, d_model=2048, d_ff=8192, num_heads=32, batch_size=96, seq_len=256,
        dataset_tokens=1e9, pipe=2, data=2,
    )  # fmt: skip
    brute = [n for n in range(2, 97, 2) if 96 % n == 0 and n * 256 >= 2 * 1024 and n <= 96 // 8]
    assert list(micro_batch_sizes(wide)) == brute == [8, 12]


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ({"batch_size": 24, "seq_len": 384}, (3, 4, 6, 8, 12, 24)),  # 2.67 have 1,024 tokens
        # With 49 replicas ceil(1024 / (64 / 49) / 49) is 17 in floats; 16 have 1,024 tokens each.
        ({"batch_size": 49 * 16, "seq_len": 64, "data": 49}, (49 * 16,)),
    ],
)
def test_the_least_micro_batch_is_exact_and_rounded_up(sizes, found):
    assert micro_batch_sizes(CountedRun(**(ROOT | sizes))) == found


def test_a_named_model_is_counted_with_its_own_heads():
    spec = load_preset("8b")
    named = CountedRun(dataset_tokens=1e12, **counted_sizes(spec))
    assert named.num_params == spec.num_layers * (spec.num_block_parameters - 2 * spec.d_model)
    assert ts.cost_work("8b", dataset_tokens=1e12).num_params == named.num_params


def test_grouped_heads_lie_between_one_key_head_and_as_many_as_there_are_queries():
    def keys_sent(heads: int) -> float:
        run = with_sizes(num_kv_heads=heads, seq=2)
        return work_of(run).backward.sent[WorkAxis.SEQUENCE]

    one, two, eight = (keys_sent(heads) for heads in (1, 2, 8))
    assert two - one == pytest.approx((eight - one) / 7)


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"pipe": 5}, "12 layers do not come apart in 5 equal parts: pipe"),
        ({"data": 3}, "2,048 sequences of a batch do not come apart in 3 equal parts"),
        ({"num_experts": 3}, "2,048 tokens do not come apart in 3 equal parts: num_experts"),
        ({"num_experts": 2, "exp": 4}, "2 experts do not come apart in 4 equal parts"),
        ({"seq": 4096}, "2,048 tokens at an expert do not come apart in 4,096 equal parts"),
        ({"tensor_int": 3}, "channels of d_ff do not come apart in 3 equal parts"),
        ({"data": 2048, "seq": 512, "d_ff": 1024}, r"parts \(data x seq\)"),
        ({"dataset_tokens": 1e6}, "no more than half a batch of 4,194,304 tokens"),
        ({"dataset_tokens": float("nan")}, "--dataset-tokens needs to be a finite number"),
        ({"d_modle": 3}, "unknown size 'd_modle': did you mean 'd_model'"),
    ],
)
def test_runs_that_cannot_be_are_refused_in_a_sentence(sizes, told):
    with pytest.raises(ts.TwinstreamError, match=told):
        ts.cost_work(**(ROOT | sizes))


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"pipe": 12, "batch_size": 32}, "for 4 a stage would be 48, and should be at most 32"),
        ({"tensor_int": 2}, "the 1,024 channels of heads would be 2"),
        ({"tensor_ext": 2}, "the 1,024 channels of d_model would be 2"),
        ({"batch_size": 127, "seq_len": 512, "pipe": 3}, "no size from 2 to 10 divides"),
    ],
)
def test_runs_that_a_rule_of_thumb_forbids(sizes, told):
    run = CountedRun(**(ROOT | sizes))
    with pytest.raises(CostError, match=told):
        micro_batch_sizes(run)
