"""Times of a run against arithmetic by hand."""

import tomllib
from pathlib import Path

import pytest

from tests.front_door.command_line import call, error_of
from twinstream.cost.bill import Prices
from twinstream.cost.refusal import CostError
from twinstream.cost.time.batch import Setting, batch_time
from twinstream.cost.time.chips import Chip, chip_names, load_chip
from twinstream.cost.time.plan import Cut, Layout, Stack
from twinstream.cost.time.run import TimeCost

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


def test_a_matmul_takes_its_flops_or_its_bytes_whichever_is_longer():
    tokens, inner = 8 * TOKENS, 5 * WIDTH
    found = batch_time(setting())
    assert found.matmul_shape == (inner, WIDTH, tokens)
    assert found.matmul_s == pytest.approx(2 * inner * WIDTH * tokens / 0.5e12)
    assert batch_time(setting(bits=16)).matmul_s == pytest.approx(2 * found.matmul_s)
    assert found.matmul_limit == "compute"
    memory = ROUND.memory_bytes_per_s.model_copy(update={"value": 1e8})
    slow = ROUND.model_copy(update={"memory_bytes_per_s": memory})
    bound = batch_time(setting().model_copy(update={"chip": slow}))
    assert bound.matmul_limit == "memory"
    assert bound.matmul_s == pytest.approx((inner * WIDTH + (inner + WIDTH) * tokens) / 1e8)


def test_the_bubble_is_a_run_of_layers_of_each_stage_but_one_with_all_its_exchanges():
    found = batch_time(setting(pp=4, interleaving=2, tp=4))
    hidden_s = 2 * 8 * TOKENS * WIDTH / 1e9  # both ways
    layer_s = 6 * found.matmul_s + 2 * hidden_s
    assert (found.layers_per_run, found.bubble_layers) == (2, 6)
    assert found.bubble_s == pytest.approx(3 * (2 * layer_s + hidden_s / 4))


def test_a_full_pipeline_hides_the_shorter_of_matmuls_and_exchanges():
    found = batch_time(setting(pp=4, tp=4))
    steps, hidden_s = 4 * 8, 2 * 8 * TOKENS * WIDTH / 1e9
    assert found.steady_compute_s == pytest.approx(steps * 6 * found.matmul_s)
    assert found.steady_network_s == pytest.approx(steps * (2 * hidden_s + 2 * hidden_s / 4 / 4))
    assert found.steady_s == max(found.steady_compute_s, found.steady_network_s)
    assert found.batch_s == found.bubble_s + found.steady_s + found.gradient_s


def test_parts_of_the_outer_width_sum_the_inner_one():
    found = batch_time(setting(tp2=2))
    inner = found.exchanges[0]
    assert (inner.axis, inner.sent_bytes) == ("tp2", 8 * TOKENS * 5 * WIDTH)


def test_tokens_hop_to_their_expert_only_where_no_sum_carries_them_there():
    alone = batch_time(setting({"num_experts": 8}, pp=2, interleaving=2))
    hop = next(one for one in alone.exchanges if one.when == "hop")
    hop_s = 2 * 2 * 8 * TOKENS * WIDTH / 8 / 1e9
    assert hop.both_passes_s == pytest.approx(hop_s)
    run_s = 4 * 6 * alone.matmul_s + hop_s / 2 + 3 * 7 / 8 * hop_s
    assert alone.bubble_s == pytest.approx(run_s)
    assert alone.steady_network_s == pytest.approx(8 * 8 * hop_s)
    summed = batch_time(setting({"num_experts": 8, "num_routed": 2}))
    assert [one.axis for one in summed.exchanges] == ["tp", "pp"]


def test_replicas_sum_gradients_once_a_batch():
    assert batch_time(setting()).gradient_s == 0
    found = batch_time(setting(dp=4, tp=2))
    assert found.gradient_s == pytest.approx(2 * 2 * LAYERS * 5 * WIDTH**2 / 2 / 1e9)


def test_utilization_is_of_the_peak_of_all_chips():
    found = batch_time(setting(pp=4, dp=2))
    flop = 6 * 2 * LAYERS * 5 * WIDTH**2 * 64 * TOKENS
    assert found.flop_per_batch == flop
    assert found.utilization == pytest.approx(flop / (8 * 1e12 * found.batch_s))


def test_whole_batches_are_trained_and_gpus_of_a_pod_are_all_paid_for():
    found = TimeCost.of(setting(dp=2), Prices(price_per_gpu_hour=3.0))
    assert found.num_batches == 1e6 // (64 * TOKENS) == 30
    assert found.bill.run_days == pytest.approx(30 * found.batch.batch_s / 86400)
    assert found.bill.gpu_hours == pytest.approx(8 * 24 * found.bill.run_days)
    assert found.bill.money == pytest.approx(3 * found.bill.gpu_hours)


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
        (("--chip", "h100"), "did you mean 'H100'?"),
        (("--chip", "none.toml"), "No such file"),
        (("--network-bandwidth", -1), "--network-bandwidth needs to be more than 0"),
        (("--base-utilization", 60), "--base-utilization needs to be less than or equal to 10"),
        (("--base-utilization", 0), "greater than 0"),
    ],
)
def test_runs_that_cannot_be_are_refused_in_a_sentence(given, told):
    message = error_of("cost", "time", *ROOT, *given)
    assert told in message and message.count("\n") == 1
