"""Every command does what it says, for people and as JSON."""

import json
import re

import pytest

from tests.front_door.command_line import SUMMARY_KEYS, TINY_STEP, call, error_of
from twinstream.hardware_profiles.loader import load_machine, machine_names
from twinstream.models.presets import preset_names
from twinstream.schedule.document import Schedule
from twinstream.schedule.files import read_document
from twinstream.schedule.timeline import Timeline

PLAN = ("plan", *TINY_STEP, "--machine", "cpu")


def table_of(*arguments: object) -> str:
    """What a command prints for people: succeeds, and fits into 100 columns."""
    outcome = call(*arguments)
    assert outcome.code == 0, outcome.err
    too_wide = [line for line in outcome.out.splitlines() if len(line) > 100]
    assert too_wide == []
    return outcome.out


def test_the_help_groups_the_commands_by_the_three_questions():
    printed = table_of("--help")
    first, second, third = (
        printed.index(question)
        for question in (
            "How fast would it train, what should I buy?",
            "Train it here",
            "How far off was the prediction?",
        )
    )
    assert first < printed.index("│ plan ") < second
    assert second < printed.index("│ run ") < third
    assert third < printed.index("│ compare ")


COMMANDS = """
models machines clusters probe plan verify simulate run compare validate demo report
trace sweep whatif explore
"""


@pytest.mark.parametrize("command", COMMANDS.split())
def test_every_command_has_help_and_takes_json(command):
    assert "--json" in table_of(command, "--help")


def test_models_lists_every_preset():
    printed = table_of("models")
    assert all(name in printed for name in preset_names())
    sizes = {
        model["name"]: model["num_parameters"]
        for model in call("models", "--json").json()["models"]
    }
    assert sizes.keys() == set(preset_names())
    # Llama 3 8B, as published.
    assert sizes["8b"] == 8_030_261_248


def test_a_config_that_states_no_dtype_is_float32_and_that_is_said_with_how_to_choose(tmp_path):
    sizes = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256,
        "num_hidden_layers": 2, "num_attention_heads": 4,
    }  # fmt: skip
    for extra, chosen, dtype, noted in (
        ({}, (), "float32", True),
        ({}, ("--dtype", "bfloat16"), "bfloat16", False),
        ({"torch_dtype": "bfloat16"}, (), "bfloat16", False),
        ({"dtype": "bfloat16"}, ("--dtype", "float32"), "float32", False),
    ):
        config = tmp_path / "config.json"
        config.write_text(json.dumps(sizes | extra))
        step = ("--seq-len", 64, "--tokens-per-step", 64, "--machine", "cpu")
        ask = ("plan", "--model", config, *step, "--policy", "resident", *chosen)
        ask = (*ask, "-o", tmp_path / "p")
        notes = call(*ask, "--json").json()["notes"]
        assert json.loads((tmp_path / "p").read_text())["model"]["spec"]["dtype"] == dtype
        assert any("states no dtype, so float32" in " ".join(n.split()) for n in notes) == noted
    assert "known: bfloat16, float32" in error_of(*PLAN, "--dtype", "fp8")


def test_machines_says_how_far_predictions_are_off_and_how_that_was_found():
    told = " ".join(call("machines").out.split("the rest is")[1].split())
    by_kind = dict(re.findall(r"(mean error [a-z ]+): ([a-z0-9_, ]+?)(?= mean| no |$| A )", told))
    held_out = by_kind["mean error on measured runs that the profile was not fitted to"]
    assert {"h100", "h100_training", "rtx3090"} <= set(held_out.split(", "))
    borrowed = by_kind["mean error where borrowing what kernels reach could be tested"]
    assert "mi300x" in borrowed and "h100," not in borrowed
    listed = {one["name"]: one for one in call("machines", "--json").json()["machines"]}
    error = listed["h100"]["uncertainty"]  # of flash3, whose rates it has
    assert (error["mean"], error["of_attention"]) == (0.0104, 0)


def test_machines_lists_every_profile():
    printed = table_of("machines")
    assert all(name in printed for name in machine_names())
    listed = call("machines", "--json").json()["machines"]
    assert [machine["name"] for machine in listed] == list(machine_names())
    assert listed[0]["hbm_bytes_per_s"]["value"] > 0


def test_plan_prints_the_predicted_summary_and_writes_the_schedule(tmp_path):
    path = tmp_path / "plan.json"
    printed = table_of(*PLAN, "--device-mem", "6MiB", "-o", path)
    assert "tiny planned for cpu" in printed
    assert "tokens/s" in printed
    schedule = read_document(Schedule, path)
    assert schedule.caps.device_bytes == 6 * 2**20
    assert schedule.workload.tokens_per_step == 256


def test_plan_passes_every_option_on():
    fixed = (
        "--chunk-tokens",
        32,
        "--chunks-per-round",
        4,
        "--device-mem",
        "50%",
        "--host-mem",
        10**9,
    )
    document = call(*PLAN, *fixed, "--policy", "streaming", "--json").json()
    assert document["workload"] == {
        "seq_len": 64,
        "chunk_tokens": 32,
        "chunks_per_round": 4,
        "rounds_per_step": 2,
    }
    whole = load_machine("cpu").number("device_memory_bytes")
    assert document["caps"]["device_bytes"] == whole / 2
    assert document["caps"]["host_bytes"] == 10**9
    assert document["policy"] == "streaming"


def test_the_dtype_of_gradients_and_a_master_are_part_of_the_recipe(tmp_path):
    path = tmp_path / "plan.json"
    table_of(*PLAN, "--gradients", "float32", "--optimizer-state", "float32_master", "-o", path)
    recipe = read_document(Schedule, path).recipe
    assert (recipe["gradients"], recipe["optimizer_state"]) == ("float32", "float32_master")


def test_a_plan_for_less_memory_is_the_answer_where_nothing_faster_is_found(tmp_path):
    """A little more memory, and `streaming` is slower by 2 %."""
    profile, before, after = (
        tmp_path / name for name in ("slow.toml", "before.json", "after.json")
    )
    links = (f"pcie_{way}_bytes_per_s = 5e7\n" for way in ("h2d", "d2h", "duplex"))
    profile.write_text('base = "cpu"\n' + "".join(links))
    ask = ("plan", *TINY_STEP, "--machine", profile, "--policy", "streaming", "--host-mem", "20MiB")
    small, large = (("--device-mem", round(mib * 2**20)) for mib in (6.2, 6.8))
    first = call(*ask, *small, "-o", before, "--json").json()["step_time_s"]
    assert call(*ask, *large, "--json").json()["step_time_s"] > 1.01 * first
    named = call(*ask, *large, "--warm-start", before, "--json").json()
    assert (named["step_time_s"], named["known_plan"]) == (first, str(before))
    told = "this is that plan"
    printed = table_of(*ask, *large, "--warm-start", before, "-o", after)
    assert f"Nothing faster than {before} was found: {told}." in " ".join(printed.split())
    assert call("simulate", after, "--machine", profile, "--json").json()["step_time_s"] == first
    assert call("verify", after, "--json").json()["ok"] is True
    assert read_document(Schedule, after).caps.device_bytes == large[1]
    assert told not in table_of(*ask, "--device-mem", "40MiB", "--warm-start", before)
    refused = error_of(*ask, *large, "--chunk-tokens", 32, "--warm-start", before)
    assert f"error: --warm-start {before} differs in " in refused


def test_sequences_of_unequal_lengths_are_planned_and_trained(tmp_path):
    path, model = tmp_path / "plan.json", ("--model", "tiny", "--seq-len", "30,5,1,28")
    step = (*model, "--tokens-per-step", 256, "--chunk-tokens", 128)
    printed = table_of("plan", *step, "--machine", "cpu", "--device-mem", "7MiB", "-o", path)
    assert "sequences of 30, 5, 1, 28, 30, 5, 1, 28" in printed
    workload = read_document(Schedule, path).workload
    assert workload.packing is not None
    assert workload.packing.expected_lengths == 2 * (30, 5, 1, 28)
    assert call("verify", path, "--json").json()["ok"] is True
    losses = call("run", path, "--steps", 2, "--json").json()["losses"]
    assert 0 < losses[1] < losses[0]
    equal = call("plan", *TINY_STEP[:2], "--seq-len", "64,64", "--machine", "cpu", "--json").json()
    assert equal["workload"]["seq_len"] == 64


def test_verify_says_that_a_plan_is_safe(files):
    assert "safe in every execution" in table_of("verify", files.schedule)
    document = call("verify", files.schedule, "--json").json()
    assert document["ok"] is True
    assert document["violations"] == []


def test_simulate_prints_figures_and_utilization_and_writes_a_timeline(files):
    assert "Utilization" in table_of("simulate", files.schedule)
    assert read_document(Timeline, files.predicted).provenance.kind == "simulated"


def test_simulate_as_json_has_the_headline_figures(files):
    document = call("simulate", files.schedule, "--json").json()
    assert document.keys() >= SUMMARY_KEYS
    assert document["simulated_on"] == "cpu"
    assert document["utilization"]["compute"] > 0


def test_simulate_takes_another_machine_than_the_planned_one(files, tmp_path):
    slow = tmp_path / "slow.toml"
    slow.write_text('base = "cpu"\npeak_fp32_flop_per_s = 1.6e10\n')  # a tenth
    fast_s, slow_s = (
        call("simulate", files.schedule, *machine, "--json").json()["step_time_s"]
        for machine in ((), ("--machine", slow))
    )
    assert slow_s > 3 * fast_s


def test_run_prints_losses_and_writes_a_timeline(files):
    assert "loss of 2 steps: 5." in table_of(
        "run", files.schedule, "--steps", 2, "--backend", "cpu"
    )
    assert read_document(Timeline, files.measured).provenance.kind == "measured"


def test_run_shows_the_prediction_beside_what_was_measured_with_the_error(files):
    run = ("run", files.schedule, "--steps", 2, "--backend", "cpu")
    told = call(*run, "--json").json()
    predicted = call("simulate", files.schedule, "--json").json()
    share = told["core_share"]  # of the time, in which kernels had a core
    measured_as = {"step_time_s": share, "tokens_per_s": 1 / share, "mfu": 1 / share}
    for name, factor in measured_as.items():
        assert told["predicted"][name] == predicted[name]
        assert told["error"][name] == pytest.approx(predicted[name] / (told[name] * factor) - 1)
    out = call(*run).out
    head = next(line for line in out.splitlines() if "predicted" in line)
    assert head.split() == ["predicted", "measured", "error"]
    rate = next(line for line in out.splitlines() if "throughput" in line).split()
    assert rate[2] == f"{predicted['tokens_per_s']:,.0f}" and rate[-1].endswith("%")
    planned = out.split("Planned:")[1]
    assert "device memory" in planned and "cap 6.00 MiB" in planned and "step time" not in planned


def test_a_run_reads_the_text_that_it_is_given(files, tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(b"one two three " * 50)
    run = ("run", files.schedule, "--steps", 2, "--backend", "cpu", "--json")
    document = call(*run, "--text", text).json()
    assert document["machine"] == "cpu" and len(document["losses"]) == 2
    assert document["losses"] != call(*run).json()["losses"]


def test_a_run_has_no_mfu_where_nobody_gave_the_peak(files, tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text('base = "cpu"\n')
    path = tmp_path / "plan.json"
    assert call("plan", *TINY_STEP, "--machine", mine, "-o", path).code == 0
    run = ("run", path, "--steps", 1, "--backend", "cpu")
    assert "give the profile" in table_of(*run)
    assert call(*run, "--json").json()["mfu"] is None
    assert call(*run, "--machine", mine, "--json").json()["mfu"] > 0
    assert call(*run, "--machine", "h100", "--json").json()["mfu"] is None, "this ran on a CPU"


def test_the_seed_and_the_learning_rate_matter(files):
    run = ("run", files.schedule, "--steps", 2, "--backend", "cpu", "--json")
    usual = call(*run).json()["losses"]
    other_seed = call(*run, "--seed", 1).json()["losses"]
    at_rest = call(*run, "--learning-rate", 0).json()["losses"]
    assert other_seed[0] != usual[0]
    assert at_rest[0] == usual[0]
    assert at_rest[1] != usual[1]


def test_compare_prints_figures_kinds_streams_and_the_worst_ops(files):
    printed = table_of("compare", files.schedule, files.predicted, files.measured)
    for part in ("tokens/s", "MFU", "block_backward", "0:compute", "Ops that differ most"):
        assert part in printed


def test_compare_as_json_has_both_sides_and_their_error(files):
    document = call("compare", files.schedule, files.predicted, files.measured, "--json").json()
    before, after = document["predicted"], document["measured"]
    assert before.keys() >= SUMMARY_KEYS
    assert after.keys() >= SUMMARY_KEYS
    share = after["core_share"]  # of the time, in which kernels had a core
    for name, error in document["error"].items():
        factor = share if name.endswith("_time_s") else 1 / share
        assert error == pytest.approx(before[name] / (after[name] * factor) - 1)
    assert len(document["worst_ops"]) == 10
    assert {stream["name"] for stream in document["streams"]} >= {"0:compute", "0:h2d"}


@pytest.mark.usefixtures("quick_probe")
def test_probe_writes_a_profile_that_plans(tmp_path):
    path = tmp_path / "here.toml"
    printed = table_of("probe", "-o", path, "--dtype", "float32")
    assert "peak_fp32_flop_per_s" in printed
    assert load_machine(path).number("peak_fp32_flop_per_s") > 0
    assert call("plan", *TINY_STEP, "--machine", path, "--json").json()["machine"] == "cpu-probed"


@pytest.mark.usefixtures("quick_probe")
def test_probe_measures_the_dtypes_asked_for_and_float32_which_every_plan_needs(tmp_path):
    path = tmp_path / "here.toml"
    document = call("probe", "--dtype", "bfloat16", "-o", path, "--json").json()
    assert document["peak_bf16_flop_per_s"]["kind"] == "measured"
    assert document["peak_fp32_flop_per_s"]["kind"] == "measured"
    step = ("--seq-len", 64, "--tokens-per-step", 128, "--machine", path)
    for dtype in ("bfloat16", "float32"):
        assert call("plan", "--model", "tiny", "--dtype", dtype, *step, "--json").json()
