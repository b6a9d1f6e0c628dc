"""Counts of a run against arithmetic by hand."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.front_door.command_line import call, error_of
from twinstream.cost.bill import CostError, Prices
from twinstream.cost.mesh_work import Batches, BatchWork, Decoder, PassWork, WorkAxis, WorkMesh
from twinstream.cost.work import Counting, DecoderOptions, limits_of, work_document
from twinstream.models.flops import model_flops_per_sequence
from twinstream.models.presets import load_preset
from twinstream.models.spec import ModelSpec

LAYERS, WIDTH, INNER, HEADS, HEAD, TOKENS, SEQUENCES, STEPS = 4, 256, 512, 8, 32, 64, 16, 10
SIZES = DecoderOptions(
    num_layers=LAYERS, d_model=WIDTH, d_ffn=INNER, num_heads=HEADS, d_head=HEAD
)  # fmt: skip
DENSE = SIZES.decoder(TOKENS)
BATCHES = Batches(batch_size=SEQUENCES, seq_len=TOKENS, dataset_tokens=SEQUENCES * TOKENS * STEPS)
HIDDEN = LAYERS * SEQUENCES * TOKENS * WIDTH * STEPS  # values between layers, of the run
RUN = Counting(checks=False, device_flop_per_s=1e12)
ROOT = ("--num-layers", 12, "--d-model", 1024, "--dataset-size", 1e10)


def cost(decoder: Decoder = DENSE, counting: Counting = RUN, **degrees: int) -> SimpleNamespace:
    return SimpleNamespace(
        **work_document(decoder, BATCHES, WorkMesh(**degrees), counting, Prices())
    )


def along(found: SimpleNamespace, axis: WorkAxis) -> SimpleNamespace:
    return next(SimpleNamespace(**one) for one in found.axes if one["axis"] == axis)


def busy(found: SimpleNamespace) -> set[str]:
    return {one["axis"] for one in found.axes if one["sent_bytes_fwd"] or one["received_bytes_bwd"]}


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
    weights = 2 * DENSE.num_params * STEPS
    assert busy(found) == {WorkAxis.DATA}
    assert found.sent_bytes_fwd == weights  # each value to all at once
    assert found.received_bytes_fwd == 3 * weights
    assert found.sent_bytes_bwd == found.received_bytes_bwd == 3 * weights
    assert found.flop_bwd == cost().flop_bwd + 3 * DENSE.num_params * STEPS


def test_stages_hand_on_what_is_between_layers():
    found = cost(pipe=4)
    handed_on = 2 * HIDDEN * 3 / LAYERS
    assert busy(found) == {WorkAxis.PIPE}
    assert found.sent_bytes_fwd == pytest.approx(handed_on)
    assert found.received_bytes_bwd == pytest.approx(handed_on)


def test_parts_of_the_inner_width_sum_the_output_of_a_layer():
    found = along(cost(tensor_int=4, data=1), WorkAxis.TENSOR_INTERNAL)
    gathered = 2 * 2 * LAYERS * WIDTH * HEAD * STEPS  # keys' and values' weights, for all heads
    assert found.sent_bytes_fwd == 2 * HIDDEN * (3 + 1) + gathered
    assert found.received_bytes_fwd == 2 * HIDDEN * (3 + 3) + 3 * gathered


def test_tokens_go_to_other_experts_as_often_as_those_are_elsewhere():
    experts = DENSE.model_copy(update={"num_experts": 4})
    found = along(cost(experts, exp=4), WorkAxis.EXPERT)
    keys_values = 2 * 2 * LAYERS * SEQUENCES * TOKENS * HEAD * STEPS
    assert found.sent_bytes_fwd == 2 * HIDDEN * 3 / 4 + keys_values
    assert found.received_bytes_fwd == 2 * HIDDEN * 3 / 4 + 3 * keys_values


def test_recompute_adds_the_forward_to_the_backward():
    plain, twice = cost(tensor_int=2), cost(counting=RUN.model_copy(update={"recompute": True}),
                                            tensor_int=2)  # fmt: skip
    assert twice.flop_fwd == plain.flop_fwd
    assert twice.flop_bwd == plain.flop_bwd + plain.flop_fwd
    sent = plain.sent_bytes_bwd + plain.sent_bytes_fwd
    assert twice.sent_bytes_bwd == sent


def test_the_forward_alone_is_timed_and_both_passes_are_counted():
    found = cost(counting=RUN.model_copy(update={"forward_only": True}), data=2)
    assert found.rates["run_s"] == pytest.approx(found.flop_fwd / 2e12)
    assert found.rates["sent_bytes_per_s"] == pytest.approx(
        found.sent_bytes_fwd / found.flop_fwd * 1e12
    )
    assert found.flop_total == found.flop_fwd + found.flop_bwd


def test_parameters_of_each_kind_of_layer():
    attention, network = 2 * (HEADS + 1) * HEAD, 2 * INNER
    assert DENSE.num_params == LAYERS * WIDTH * (attention + network)
    others = {"no_multi_query_attn": True, "use_glu": True, "num_experts": 3}
    full = SIZES.model_copy(update=others).decoder(TOKENS)
    assert full.num_params == 3 * LAYERS * WIDTH * (4 * HEADS * HEAD + 3 * INNER)
    assert full.num_params_per_token == full.num_params / 3


_SHARES = st.floats(0, 0.5)
_DEGREES = st.sampled_from((1, 2, 4, 8))


@given(_DEGREES, _DEGREES, _SHARES, _SHARES)
def test_shares_of_axes_add_up_to_the_whole(outer, inner, one, other):
    batch = BatchWork(DENSE, BATCHES, WorkMesh(data=outer, tensor_int=inner))
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
    batch = BatchWork(DENSE, BATCHES, WorkMesh(data=4))
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
    batches = Batches(batch_size=96, seq_len=256, dataset_tokens=1e9)
    wide = DecoderOptions(num_layers=4, d_model=2048).decoder(256)
    limits, sizes = limits_of(wide, batches, WorkMesh(pipe=2, data=2))
    brute = [n for n in range(2, 97, 2) if 96 % n == 0 and n * 256 >= 2 * 1024 and n <= 96 // 8]
    assert list(sizes) == brute == [8, 12]
    assert all(limit["holds"] for limit in limits)


def test_the_least_micro_batch_is_rounded_up():
    batches = Batches(batch_size=24, seq_len=384, dataset_tokens=1e9)  # 2.67 have 1,024 tokens
    assert limits_of(DENSE, batches, WorkMesh())[1] == (3, 4, 6, 8, 12, 24)


def test_the_least_micro_batch_is_exact_where_floats_are_not():
    """With 49 replicas ceil(1024 / (64 / 49) / 49) is 17 in floats; 16 have 1,024 tokens each."""
    batches = Batches(batch_size=49 * 16, seq_len=64, dataset_tokens=1e9)
    assert limits_of(DENSE, batches, WorkMesh(data=49))[1] == (49 * 16,)


def test_widths_by_default_by_ratio_and_as_given():
    def sizes(**given: float) -> ModelSpec:
        options = {"num_layers": 1, "d_model": 1024, **given}
        return DecoderOptions.model_validate(options).decoder(1).spec

    assert sizes().d_ff == 4096
    assert sizes(d_ffn_ratio=3).d_ff == 3072 and sizes(d_ffn=7).d_ff == 7
    assert sizes().num_heads == 16 and sizes(num_heads=5).num_heads == 5
    assert sizes(total_attn_width_ratio=0.5).num_heads == 8
    with pytest.raises(CostError, match=r"153\.6 channels wide"):
        sizes(d_model=512, total_attn_width_ratio=0.3)


def test_a_named_model_is_counted_with_its_own_heads():
    spec, named = load_preset("8b"), DecoderOptions(model="8b").decoder(4096)
    assert named.num_params == spec.num_layers * (spec.num_block_parameters - 2 * spec.d_model)
    assert (
        named.num_params
        == DecoderOptions(
            num_layers=32, d_model=4096, d_ffn=14336, num_heads=32, d_head=128, use_glu=True
        )
        .decoder(4096)
        .num_params
        + 32 * 4096 * 2 * 7 * 128
    )  # 8 key and value heads, not 1
    told = ("cost", "work", "--model", "8b", "--seq-len", 4096, "--dataset-size", 1e12)
    found = call(*told, "--json").json()
    flop = found["num_batches"] * 2048 * model_flops_per_sequence(spec, 4096)
    assert found["model"] == {"name": "8b", "num_params": 8030261248, "flop_total": flop}
    assert "8.030e+09" in call(*told).out
    typed = call("cost", "work", *ROOT, "--json").json()
    assert typed["model"] is None


def test_grouped_heads_lie_between_one_key_head_and_as_many_as_there_are_queries():
    def keys_sent(**heads: object) -> float:
        spec = DENSE.spec.model_copy(update=heads)
        return along(cost(Decoder(spec=spec), seq=2), WorkAxis.SEQUENCE).sent_bytes_bwd

    one, two, eight = (keys_sent(num_kv_heads=heads) for heads in (1, 2, 8))
    assert two - one == pytest.approx((eight - one) / 7)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--model", "8b"), "leave out --num-layers, --d-model"),
        (("--p-pipe", 5), "12 layers do not come apart in 5 equal parts: --p-pipe"),
        (("--p-data", 3), "2,048 sequences of a batch do not come apart in 3 equal parts"),
        (("--num-experts", 3), "2,048 tokens do not come apart in 3 equal parts: --num-experts"),
        (("--num-experts", 2, "--p-exp", 4), "2 experts do not come apart in 4 equal parts"),
        (("--p-seq", 4096), "2,048 tokens at an expert do not come apart in 4,096 equal parts"),
        (("--p-tensor-int", 3), "channels of --d-ffn do not come apart in 3 equal parts"),
        (("--p-data", 2048, "--p-seq", 512, "--d-ffn", 1024, "--skip-efficiency-check"),
         "parts (--p-data x --p-seq)"),
        (("--d-head", 100), "1,024 channels of --d-model do not come apart in 100 equal parts"),
        (("--d-ffn", 1024, "--d-ffn-ratio", 2), "give one"),
        (("--num-heads", 8, "--total-attn-width-ratio", 0.5), "give one"),
        (("--p-pipe", 12, "--batch-size", 32), "would be 32, and should be at least 48"),
        (("--p-tensor-int", 2), "the 1,024 channels of the heads would be 2"),
        (("--p-tensor-ext", 2), "the 1,024 channels of --d-model would be 2"),
        (("--batch-size", 127, "--seq-len", 512, "--p-pipe", 3), "sizes from 2 to 10 that divide"),
        (("--dataset-size", 1e6), "no more than half a batch of 4,194,304 tokens"),
        (("--dataset-size", "nan"), "--dataset-size needs to be a finite number"),
        (("--cluster-flop-rate", 0), "--cluster-flop-rate needs to be greater than 0"),
        (("--price-per-gpu-hour", 2), "which needs --cluster-flop-rate"),
    ],
)  # fmt: skip
def test_runs_that_cannot_be_are_refused_in_a_sentence(given, told):
    message = error_of("cost", "work", *ROOT, *given)
    assert told in message and message.count("\n") == 1


def test_a_forbidden_run_is_counted_if_it_is_asked_for_and_says_what_does_not_hold():
    skipped = (*ROOT, "--p-tensor-int", 2, "--skip-efficiency-check")
    limits = call("cost", "work", *skipped, "--json").json()["limits"]
    assert [one["of"] for one in limits if not one["holds"]] == [
        "--p-tensor-int over the 1,024 channels of the heads"
    ]
    assert "does not hold" in call("cost", "work", *skipped).out


def test_without_a_rate_there_is_no_time():
    found = call("cost", "work", *ROOT, "--json").json()
    assert found["runtime_sec"] is found["run_days"] is found["gpu_hours"] is None
    assert "need --cluster-flop-rate" in call("cost", "work", *ROOT).out
