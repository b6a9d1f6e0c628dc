"""Times of a run against arithmetic by hand."""

import json
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.front_door.command_line import call, error_of
from twinstream.cost.bill import CostError, Prices
from twinstream.cost.chip import Chip, chip_names, load_chip
from twinstream.cost.time import Cut, Layout, Setting, Stack, time_document
from twinstream.models.flops import model_flops_per_sequence
from twinstream.models.presets import load_preset
from twinstream.models.to_hf_config import to_hf_config

WIDTH, LAYERS, TOKENS = 1024, 16, 512
CHIP = """
name = "round"
description = "a chip of round numbers"
num_gpus = 4
flop_per_s_8bit = {value = 1e12, kind = "assumed", source = "the test"}
memory_bytes_per_s = {value = 1e12, kind = "assumed", source = "the test"}
network_bytes_per_s = {value = 1e9, kind = "assumed", source = "the test"}
"""
ROUND = Chip.model_validate(tomllib.loads(CHIP))
ROOT = ("--n-layers", 24, "--d-model", 2048)


def setting(stack: dict[str, int] | None = None, bits: int = 8, **degrees: int) -> Setting:
    return Setting(
        stack=Stack(num_layers=LAYERS, d_model=WIDTH, **(stack or {})),
        cut=Cut(batch_size=64, microbatch_size=8, seq_len=TOKENS, dataset_tokens=1e6),
        layout=Layout(**degrees),
        chip=ROUND,
        precision_bits=bits,
        base_utilization=0.5,
    )


def time_of(setting: Setting, **prices: float) -> SimpleNamespace:
    return SimpleNamespace(**time_document(setting, Prices(**prices)))


def test_a_matmul_takes_its_flops_or_its_bytes_whichever_is_longer():
    tokens, inner = 8 * TOKENS, 5 * WIDTH
    found = time_of(setting())
    assert found.matmul_shape == [inner, WIDTH, tokens]
    assert found.matmul_s == pytest.approx(2 * inner * WIDTH * tokens / 0.5e12)
    assert time_of(setting(bits=16)).matmul_s == pytest.approx(2 * found.matmul_s)
    assert found.matmul_limit == "compute"
    memory = ROUND.memory_bytes_per_s.model_copy(update={"value": 1e8})
    slow = ROUND.model_copy(update={"memory_bytes_per_s": memory})
    bound = time_of(setting().model_copy(update={"chip": slow}))
    assert bound.matmul_limit == "memory"
    assert bound.matmul_s == pytest.approx((inner * WIDTH + (inner + WIDTH) * tokens) / 1e8)


def test_the_bubble_is_a_run_of_layers_of_each_stage_but_one_with_all_its_exchanges():
    found = time_of(setting(pp=4, interleaving=2, tp=4))
    hidden_s = 2 * 8 * TOKENS * WIDTH / 1e9  # both ways
    layer_s = 6 * found.matmul_s + 2 * hidden_s
    assert found.pipeline == [4, 2, 2, 6]
    assert found.pipeline_bubble_s == pytest.approx(3 * (2 * layer_s + hidden_s / 4))


def test_a_full_pipeline_hides_the_shorter_of_matmuls_and_exchanges():
    found = time_of(setting(pp=4, tp=4))
    steps, hidden_s = 4 * 8, 2 * 8 * TOKENS * WIDTH / 1e9
    assert found.pipeline_full_flop_s == pytest.approx(steps * 6 * found.matmul_s)
    assert found.pipeline_full_net_s == pytest.approx(steps * (2 * hidden_s + 2 * hidden_s / 4 / 4))
    assert found.pipeline_full_s == max(found.pipeline_full_flop_s, found.pipeline_full_net_s)
    assert found.batch_s == found.pipeline_bubble_s + found.pipeline_full_s + found.grad_reduction_s


def test_parts_of_the_outer_width_sum_the_inner_one():
    found = time_of(setting(tp2=2))
    inner = found.exchanges[0]
    assert (inner["axis"], inner["sent_bytes"]) == ("tp2", 8 * TOKENS * 5 * WIDTH)


def test_tokens_hop_to_their_expert_only_where_no_sum_carries_them_there():
    alone = time_of(setting({"num_experts": 8}, pp=2, interleaving=2))
    hop = next(one for one in alone.exchanges if one["when"] == "hop")
    hop_s = 2 * 2 * 8 * TOKENS * WIDTH / 8 / 1e9
    assert 2 * hop["seconds"] == pytest.approx(hop_s)
    run_s = 4 * 6 * alone.matmul_s + hop_s / 2 + 3 * 7 / 8 * hop_s
    assert alone.pipeline_bubble_s == pytest.approx(run_s)
    assert alone.pipeline_full_net_s == pytest.approx(8 * 8 * hop_s)
    summed = time_of(setting({"num_experts": 8, "num_routed": 2}))
    assert [one["axis"] for one in summed.exchanges] == ["tp", "pp"]


def test_replicas_sum_gradients_once_a_batch():
    assert time_of(setting()).grad_reduction_s == 0
    found = time_of(setting(dp=4, tp=2))
    assert found.grad_reduction_s == pytest.approx(2 * 2 * LAYERS * 5 * WIDTH**2 / 2 / 1e9)


def test_utilization_is_of_the_peak_of_all_chips():
    found = time_of(setting(pp=4, dp=2))
    flop = 6 * 2 * LAYERS * 5 * WIDTH**2 * 64 * TOKENS
    assert found.flop_per_batch == flop
    assert found.utilization == pytest.approx(flop / (8 * 1e12 * found.batch_s))


def test_whole_batches_are_trained_and_gpus_of_a_pod_are_all_paid_for():
    found = time_of(setting(dp=2), price_per_gpu_hour=3.0)
    assert found.num_batches == 1e6 // (64 * TOKENS) == 30
    assert found.run_days == pytest.approx(30 * found.batch_s / 86400)
    assert found.gpu_hours == pytest.approx(8 * 24 * found.run_days)
    assert found.money == pytest.approx(3 * found.gpu_hours)


def test_by_default_there_are_twenty_tokens_a_parameter():
    stack = Stack(num_layers=2, d_model=64, num_experts=2)
    assert stack.num_params == 2 * 2 * 2 * 64 * 320
    assert Cut(batch_size=1, seq_len=1000).num_batches(stack) == 20 * stack.num_params // 1000


@pytest.mark.parametrize("name", chip_names())
def test_every_chip_states_its_sources(name):
    chip = load_chip(name)
    rates = (chip.flop_per_s_8bit, chip.memory_bytes_per_s, chip.network_bytes_per_s)
    assert chip.name == name and all(rate.value and rate.source for rate in rates)


def test_a_pod_is_64_of_its_gpus():
    pod, alone = load_chip("H100_x64_pod"), load_chip("H100")
    assert pod.num_gpus == 64
    assert pod.flop_per_s_8bit.value == 64 * (alone.flop_per_s_8bit.value or 0)
    assert pod.memory_bytes_per_s.value == pytest.approx(64 * (alone.memory_bytes_per_s.value or 0))


def test_a_chip_of_ones_own_is_a_file(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(CHIP)
    found = call("cost", "time", *ROOT, "--chip", path, "--network-bandwidth", 5e9, "--json").json()
    assert found["asked"]["chip"]["network_bytes_per_s"]["value"] == 5e9
    assert found["num_gpus"] == 4
    path.write_text(CHIP.replace("1e12", "0"))
    with pytest.raises(CostError, match="flop_per_s_8bit of chip round"):
        load_chip(str(path))
    path.write_text("name = 'x'")
    with pytest.raises(CostError, match=r"mine.toml: description: Field required"):
        load_chip(str(path))
    path.write_text("name")
    with pytest.raises(CostError, match="not a TOML file"):
        load_chip(str(path))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--pp", 5), "5 does not divide the 24 layers"),
        (("--n-experts", 8, "--n-routed-experts", 3), "3 does not divide the 8 experts"),
        (("--microbatch-size", 3), "3 does not divide the 2,048 sequences"),
        (("--dp", 3), "--dp x --n-experts: 3 does not divide the 2,048 tokens"),
        (("--tp", 3), "3 does not divide the 10,240 channels of the inner width"),
        (("--tp2", 3), "3 does not divide the 2,048 channels of --d-model"),
        (("--pipeline-interleaving", 2), "a single stage cannot be interleaved 2 times"),
        (("--chip", "h10"), "did you mean 'H100'?"),
        (("--chip", "none.toml"), "No such file"),
        (("--network-bandwidth", -1), "--network-bandwidth needs to be more than 0"),
        (("--base-utilization", 60), "--base-utilization needs to be at most 1"),
        (("--base-utilization", 0), "greater than 0"),
        (("--chip", "tpu"), "H100_x64_pod, H200, MI300X, RTX3090, RTX4090, RTX5090, and files"),
        (("--d-internal-ratio", 1e-4), "--d-internal-ratio 0.0001 leaves no channel of 2,048"),
        (("--dp", 0), "--dp needs to be greater than 0, got 0"),
        (("--model", "8b"), "leave out --n-layers, --d-model"),
    ],
)
def test_runs_that_cannot_be_are_refused_in_a_sentence(given, told):
    message = error_of("cost", "time", *ROOT, *given)
    assert told in message and message.count("\n") == 1


NAMED = ("cost", "time", "--model", "8b", "--seq-len", 4096, "--dataset-size", 1e12)


def test_a_named_model_has_its_parameters_and_flops_in_16_bits():
    spec, found = load_preset("8b"), call(*NAMED, "--base-utilization", 0.5, "--json").json()
    assert found["num_params"] == spec.num_parameters
    batches = 1e12 // (2048 * 4096)
    flop = batches * 2048 * model_flops_per_sequence(spec, 4096)
    assert found["flop_total"] == flop
    assert found["run_days"] == pytest.approx(flop / (0.5 * 1979e12 / 2) / 86400)
    assert found["asked"]["precision_bits"] == 16
    assert call(*NAMED, "--precision-bits", 8, "--json").json()["asked"]["precision_bits"] == 8


def test_two_matrices_hold_the_weights_of_a_named_layer():
    found, spec = call(*NAMED, "--json").json(), load_preset("8b")
    inner, outer, _ = found["matmul_shape"]
    matrices = spec.num_block_parameters - 2 * spec.d_model
    assert 2 * inner * outer == matrices and outer == spec.d_model


def test_typed_sizes_stay_in_8_bits_and_the_screen_says_what_most_train_in():
    assert call("cost", "time", *ROOT, "--json").json()["asked"]["precision_bits"] == 8
    assert "--precision-bits 16" in call("cost", "time", *ROOT).out
    assert "--precision-bits 16" not in call(*NAMED).out


def test_a_config_json_is_a_model(tmp_path: Path):
    config = to_hf_config(load_preset("tiny"))
    (tmp_path / "config.json").write_text(json.dumps(config))
    named = ("--seq-len", 128, "--json", "--model")
    by_file = call("cost", "time", *named, tmp_path / "config.json").json()
    by_name = call("cost", "time", *named, "tiny").json()
    assert by_file["batch_s"] == by_name["batch_s"] and by_file["N"] == by_name["N"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--model", "mixtral-8x7b"), "the 8 experts of mixtral-8x7b share attention"),
        (("--model", "8bb"), "unknown model '8bb'"),
        (("--d-model", 64), "--model NAME, or --n-layers and --d-model"),
        (("--model", "8b", "--n-experts", 2), "leave out --n-experts"),
    ],
)
def test_models_that_cannot_be_are_refused_in_a_sentence(given, told):
    message = error_of("cost", "time", *given)
    assert told in message and message.count("\n") == 1
