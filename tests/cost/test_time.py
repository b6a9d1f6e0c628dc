"""Times of a run against arithmetic by hand."""

import json
from pathlib import Path

import pytest

import twinstream as ts
from tests.front_door.command_line import call, error_of
from twinstream.cost.bill import Prices, bill_of
from twinstream.cost.time import RunTime, TimedRun, time_of
from twinstream.models.flops import model_flops_per_sequence
from twinstream.models.presets import load_preset
from twinstream.models.to_hf_config import to_hf_config

WIDTH, LAYERS, TOKENS = 1024, 16, 512
ROUND = {"flop_per_s": 1e12, "memory_bytes_per_s": 1e12, "network_bytes_per_s": 1e9}
ROOT = {"num_layers": 24, "d_model": 2048, **ROUND}


def asked(**sizes: object) -> TimedRun:
    usual = {
        "num_layers": LAYERS, "d_model": WIDTH, "batch_size": 64, "microbatch_size": 8,
        "seq_len": TOKENS, "dataset_tokens": 1e6, "value_bytes": 1, "utilization": 0.5,
    }  # fmt: skip
    return TimedRun.model_validate(usual | ROUND | sizes)


def timed(**sizes: object) -> RunTime:
    return time_of(asked(**sizes))


def test_a_matmul_takes_its_flops_or_its_bytes_whichever_is_longer():
    tokens, inner = 8 * TOKENS, 5 * WIDTH
    found = timed()
    assert found.matmul_shape == (inner, WIDTH, tokens)
    assert found.matmul_s == pytest.approx(2 * inner * WIDTH * tokens / 0.5e12)
    assert timed(flop_per_s=0.5e12).matmul_s == pytest.approx(2 * found.matmul_s)
    bound = timed(memory_bytes_per_s=1e8)
    assert bound.matmul_s == pytest.approx((inner * WIDTH + (inner + WIDTH) * tokens) / 1e8)


def test_the_bubble_is_a_run_of_layers_of_each_stage_but_one_with_all_its_exchanges():
    found = timed(pp=4, interleaving=2, tp=4)
    hidden_s = 2 * 8 * TOKENS * WIDTH / 1e9  # both ways
    layer_s = 6 * found.matmul_s + 2 * hidden_s
    assert found.layers_per_run == 2
    assert found.bubble_s == pytest.approx(3 * (2 * layer_s + hidden_s / 4))


def test_a_full_pipeline_hides_the_shorter_of_matmuls_and_exchanges():
    found = timed(pp=4, tp=4)
    steps, hidden_s = 4 * 8, 2 * 8 * TOKENS * WIDTH / 1e9
    assert found.compute_s == pytest.approx(steps * 6 * found.matmul_s)
    assert found.network_s == pytest.approx(steps * (2 * hidden_s + 2 * hidden_s / 4 / 4))
    full_s = max(found.compute_s, found.network_s)
    assert found.batch_s == found.bubble_s + full_s + found.gradient_s


def test_parts_of_the_outer_width_sum_the_inner_one():
    found = timed(tp2=2)
    inner = found.exchanges[0]
    assert (inner.axis, inner.sent_bytes) == ("tp2", 8 * TOKENS * 5 * WIDTH)


def test_tokens_hop_to_their_expert_only_where_no_sum_carries_them_there():
    alone = timed(**{"num_experts": 8}, pp=2, interleaving=2)
    hop = next(one for one in alone.exchanges if one.when == "hop")
    hop_s = 2 * 2 * 8 * TOKENS * WIDTH / 8 / 1e9
    assert 2 * hop.seconds == pytest.approx(hop_s)
    run_s = 4 * 6 * alone.matmul_s + hop_s / 2 + 3 * 7 / 8 * hop_s
    assert alone.bubble_s == pytest.approx(run_s)
    assert alone.network_s == pytest.approx(8 * 8 * hop_s)
    summed = timed(**{"num_experts": 8, "num_routed": 2})
    assert [one.axis for one in summed.exchanges] == ["tp", "pp"]


def test_replicas_sum_gradients_once_a_batch():
    assert timed().gradient_s == 0
    found = timed(dp=4, tp=2)
    assert found.gradient_s == pytest.approx(2 * 2 * LAYERS * 5 * WIDTH**2 / 2 / 1e9)


def test_utilization_is_of_the_peak_of_all_chips():
    found = timed(pp=4, dp=2)
    flop = 6 * 2 * LAYERS * 5 * WIDTH**2 * 64 * TOKENS
    assert found.flop_total == 30 * flop
    assert found.utilization == pytest.approx(flop / (8 * 1e12 * found.batch_s))


def test_whole_batches_are_trained_and_all_gpus_are_paid_for():
    found = timed(dp=2)
    assert found.num_batches == 1e6 // (64 * TOKENS) == 30
    assert found.run_s == pytest.approx(30 * found.batch_s) and found.num_gpus == 2
    bill = bill_of(found.run_s, found.num_gpus, Prices(price_per_gpu_hour=3.0))
    assert bill.gpu_hours == pytest.approx(2 * found.run_s / 3600)
    assert bill.money == pytest.approx(3 * bill.gpu_hours)


def test_by_default_there_are_twenty_tokens_a_parameter():
    run = asked(num_layers=2, d_model=64, num_experts=2, dataset_tokens=None, batch_size=1,
                microbatch_size=1, seq_len=1000)  # fmt: skip
    assert run.num_params == 2 * 2 * 2 * 64 * 320
    assert run.num_batches == 20 * run.num_params // 1000


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"pp": 5}, "5 does not divide the 24 layers"),
        ({"num_experts": 8, "num_routed": 3}, "3 does not divide the 8 experts"),
        ({"microbatch_size": 3}, "3 does not divide the 2,048 sequences"),
        ({"dp": 3}, "dp x num_experts: 3 does not divide the 2,048 tokens"),
        ({"tp": 3}, "3 does not divide the 10,240 channels of the inner width"),
        ({"tp2": 3}, "3 does not divide the 2,048 channels of d_model"),
        ({"interleaving": 2}, "a single stage cannot be interleaved 2 times"),
        ({"network_bytes_per_s": -1.0}, "--network-bytes-per-s needs to be greater than 0"),
        ({"utilization": 60.0}, "--utilization needs to be at most 1"),
        ({"d_internal_ratio": 1e-4}, "d_internal_ratio 0.0001 leaves no channel of 2,048"),
        ({"dp": 0}, "--dp needs to be greater than 0, got 0"),
        ({"n_layer": 3}, "unknown size 'n_layer': did you mean 'num_layers'"),
    ],
)
def test_runs_that_cannot_be_are_refused_in_a_sentence(sizes, told):
    with pytest.raises(ts.TwinstreamError, match=told):
        ts.cost_time(**(ROOT | sizes))


NAMED = ("cost", "8b", "--machine", "h100", "--seq-len", 4096, "--tokens", 1e12)


def test_a_named_model_has_its_parameters_and_flops():
    spec, found = load_preset("8b"), call(*NAMED, "--utilization", 0.5, "--json").json()
    assert found["num_params"] == spec.num_parameters
    batches = 1e12 // (2048 * 4096)
    flop = batches * 2048 * model_flops_per_sequence(spec, 4096)
    assert found["flop_total"] == flop
    assert found["run_days"] == pytest.approx(flop / (0.5 * 989e12) / 86400, rel=1e-3)
    assert found["gpu_hours"] == pytest.approx(24 * found["run_days"])


def test_two_matrices_hold_the_weights_of_a_named_layer():
    found, spec = call(*NAMED, "--json").json(), load_preset("8b")
    inner, outer, _ = found["matmul_shape"]
    matrices = spec.num_block_parameters - 2 * spec.d_model
    assert 2 * inner * outer == matrices and outer == spec.d_model


def test_a_config_json_is_a_model_and_python_says_the_same(tmp_path: Path):
    config = to_hf_config(load_preset("tiny"))
    (tmp_path / "config.json").write_text(json.dumps(config))
    more = ("--machine", "h100", "--seq-len", 128, "--json")
    by_file = call("cost", tmp_path / "config.json", *more).json()
    by_name = call("cost", "--model", "tiny", *more).json()
    assert by_file["batch_s"] == by_name["batch_s"]
    assert ts.cost_time("tiny", machine="h100", seq_len=128).batch_s == by_name["batch_s"]


def test_gpus_of_a_cluster_have_the_links_of_its_node_unless_others_are_given():
    cut = ("--dp", 8, "--microbatch-size", 8, "--json")
    found = call("cost", "1b", "--cluster", "h100_dgx", *cut).json()
    weights = 2 * found["num_params"]
    assert found["gradient_s"] == pytest.approx(2 * weights / 900e9)  # NVLink, both ways
    slow = ("--machine", "h100", "--network-bandwidth", 10e9)
    assert call("cost", "1b", *slow, *cut).json()["gradient_s"] == pytest.approx(2 * weights / 10e9)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("mixtral-8x7b", "--machine", "h100"), "the 8 experts of mixtral-8x7b share attention"),
        (("8bb", "--machine", "h100"), "unknown model '8bb'"),
        (("8b",), "--machine NAME of one GPU, or --cluster NAME"),
        (("8b", "--machine", "h100", "--cluster", "h100_dgx"), "say on what"),
        (("8b", "--machine", "h10"), "'h10'"),
        (("8b", "--machine", "h100", "--tp", 8), "8 GPUs exchange data, and h100 is one"),
        (("8b", "--machine", "h100", "--utilization", 60), "--utilization needs to be at most 1"),
        (("8b", "--machine", "h100", "--tokens", "nan"), "--tokens needs to be a finite number"),
        (
            ("8b", "--machine", "h100", "--tokens", 1e3),
            "1,000 tokens are less than a batch of 4,194,304",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(given, told):
    message = error_of("cost", *given)
    assert told in message and message.count("\n") == 1
