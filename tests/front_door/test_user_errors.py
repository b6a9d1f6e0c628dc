"""Every mistake of a user gets one message that helps, exit code 2, and no traceback."""

import json

import pytest

from tests.front_door.command_line import TINY_STEP, call, error_of
from tests.front_door.conftest import Files
from twinstream.hardware_profiles.loader import machine_names
from twinstream.models.presets import preset_names
from twinstream.planner.policies import policy_names

PLAN = ("plan", *TINY_STEP, "--machine", "cpu")


def damaged(files: Files, tmp_path, *place: str | int, value: object):
    """A copy of the schedule with one value changed."""
    document = json.loads(files.schedule.read_text())
    inside = document
    for step in place[:-1]:
        inside = inside[step]
    inside[place[-1]] = value
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(document))
    return path


def test_an_unknown_model_gets_the_presets():
    message = error_of("plan", "--model", "9b", "--machine", "h100", "--seq-len", 64)
    assert "'9b'" in message
    assert all(name in message for name in preset_names())


def test_an_unknown_machine_gets_the_profiles():
    message = error_of("plan", *TINY_STEP, "--machine", "h1000")
    assert "'h1000'" in message
    assert all(name in message for name in machine_names())


def test_an_unknown_policy_gets_the_policies():
    message = error_of(*PLAN, "--policy", "greedy")
    assert "'greedy'" in message
    assert all(name in message for name in policy_names())


@pytest.mark.parametrize("size", ["24XiB", "lots", "-4GiB", "", "9" * 400 + "GiB"])
def test_a_size_that_cannot_be_read_is_shown_with_the_right_form(size):
    assert "24GiB" in error_of(*PLAN, "--device-mem", size)
    assert "24GiB" in error_of(*PLAN, "--host-mem", size)


@pytest.mark.parametrize("lengths", ["0", "-5", "long", "", "30,,5", "30,5.5", "9" * 5000])
def test_lengths_that_cannot_be_read_are_shown_with_the_right_form(lengths):
    step = ("plan", "--model", "tiny", "--machine", "cpu", "--seq-len", lengths)
    assert "300,212,512" in error_of(*step)


@pytest.mark.parametrize("options", [("--gradients", "float32"), ("--float32-master",)])
def test_what_a_policy_fixes_of_the_recipe_cannot_be_chosen(options):
    step = ("--model", "8b", "--seq-len", 4096, "--tokens-per-step", 4096, "--machine", "h100")
    message = error_of("plan", *step, "--policy", "ml_dataflow", *options)
    assert "leave out --gradients and --float32-master" in message
    assert "known: model, float32" in error_of(*PLAN, "--gradients", "half")


def test_unequal_lengths_are_refused_where_a_policy_cannot_pack_them():
    step = ("--model", "8b", "--seq-len", "4096,512", "--tokens-per-step", 4608)
    message = error_of("plan", *step, "--machine", "h100", "--policy", "ml_dataflow")
    assert "packs sequences of one length, not of 4096, 512 tokens" in message


def test_a_cap_that_is_too_small_gets_one_that_would_do():
    message = error_of(*PLAN, "--device-mem", "1MiB")
    suggested = message.split("--device-mem ")[-1].split()[0].rstrip(".")
    assert suggested.endswith("MiB")
    assert call(*PLAN, "--device-mem", suggested).code == 0


def test_a_host_cap_that_is_too_small_gets_one_that_would_do():
    caps = ("--device-mem", "6MiB")
    message = error_of(*PLAN, *caps, "--host-mem", "1MiB")
    suggested = message.split("--host-mem ")[-1].split()[0].rstrip(".")
    assert call(*PLAN, *caps, "--host-mem", suggested).code == 0


def test_a_chunk_that_fits_no_sequence_is_refused_with_the_numbers():
    message = error_of(*PLAN, "--chunk-tokens", 48)
    assert "48" in message
    assert "64" in message


@pytest.mark.parametrize("option", ["--seq-len", "--tokens-per-step", "--chunk-tokens"])
def test_a_count_that_is_not_positive_is_a_usage_error(option):
    assert option in error_of(*PLAN, option, 0)


def test_a_missing_option_is_a_usage_error():
    assert "--seq-len" in error_of("plan", "--model", "tiny", "--machine", "cpu")


def test_an_unknown_command_is_a_usage_error():
    assert "pln" in error_of("pln")


@pytest.mark.parametrize(
    "command", [("verify",), ("simulate",), ("run", "--backend", "cpu")], ids=lambda c: c[0]
)
def test_a_missing_file_is_named(command, tmp_path):
    path = tmp_path / "nowhere.json"
    message = error_of(*command, path)
    assert str(path) in message
    assert "No such file" in message


def test_a_model_file_that_is_missing_is_named(tmp_path):
    path = tmp_path / "config.json"
    assert str(path) in error_of("plan", "--model", path, "--machine", "cpu", "--seq-len", 64)


def test_a_machine_file_that_is_missing_is_named(tmp_path):
    path = tmp_path / "mine.toml"
    assert str(path) in error_of("plan", *TINY_STEP, "--machine", path)


def test_text_that_is_no_json_is_named_with_the_place(tmp_path):
    path = tmp_path / "half.json"
    path.write_text('{"tensors": [')
    message = error_of("verify", path)
    assert str(path) in message
    assert "line 1" in message


def test_a_field_of_the_wrong_type_is_named_with_its_path(files, tmp_path):
    path = damaged(files, tmp_path, "slots", 3, "size_bytes", value="big")
    assert "slots.3.size_bytes" in error_of("simulate", path)


def test_a_document_of_another_kind_is_called_what_it_is(files):
    assert "is a timeline, not a schedule" in error_of("simulate", files.predicted)
    compare = error_of("compare", files.schedule, files.schedule, files.measured)
    assert "is a schedule, not a timeline" in compare


def test_timelines_in_each_others_place_are_refused(files):
    message = error_of("compare", files.schedule, files.measured, files.predicted)
    assert "the prediction first" in message


def test_timelines_of_another_schedule_are_refused(files, tmp_path):
    other = tmp_path / "other.json"
    assert call(*PLAN, "--chunk-tokens", 32, "-o", other).code == 0
    message = error_of("compare", other, files.predicted, files.measured)
    assert "not the schedule's" in message


def test_verify_shows_what_a_damaged_schedule_breaks(files, tmp_path):
    schedule = files.read_schedule()
    index = next(i for i, op in enumerate(schedule.ops) if op.waits)
    path = damaged(files, tmp_path, "ops", index, "waits", value=[])
    outcome = call("verify", path)
    assert outcome.code == 2
    assert schedule.ops[index].op_id in outcome.out
    assert "breaks" in outcome.err
    as_json = call("verify", path, "--json")
    assert as_json.code == 2
    found = json.loads(as_json.out)
    assert found["ok"] is False
    assert schedule.ops[index].op_id in found["violations"][0]["ops"]


@pytest.mark.parametrize(
    "command", [("simulate",), ("run", "--backend", "cpu")], ids=lambda c: c[0]
)
def test_a_schedule_that_waits_for_an_unknown_op_is_not_used(command, files, tmp_path):
    path = damaged(files, tmp_path, "ops", 5, "waits", value=["nobody"])
    assert "'nobody'" in error_of(*command, path)


def test_a_workload_that_became_astronomical_is_refused_at_once(files, tmp_path):
    path = damaged(files, tmp_path, "workload", "rounds_per_step", value=2**40)
    assert "workload" in error_of("simulate", path)


def test_a_model_that_became_invalid_is_named_with_the_place(files, tmp_path):
    path = damaged(files, tmp_path, "model", "spec", "dtype", value="int8")
    assert "dtype" in error_of("simulate", path)


def test_an_unwritable_output_is_refused_before_the_work(tmp_path):
    assert str(tmp_path / "no") in error_of(*PLAN, "-o", tmp_path / "no" / "plan.json")
    assert "not a file" in error_of(*PLAN, "-o", tmp_path)


def test_a_demo_folder_that_is_a_file_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    assert str(path) in error_of("demo", "--machine", "cpu", "-o", path)


def test_without_cuda_the_message_says_how_to_run_on_the_cpu(files, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--backend cpu" in error_of("run", files.schedule, "--backend", "cuda")
    assert "--backend cpu" in error_of("demo", "--backend", "cuda")


def test_cuda_without_a_machine_asks_for_one(monkeypatch, tmp_path):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "--machine" in error_of("run", *TINY_STEP, "--backend", "cuda")
    assert "--machine" in error_of("demo", "--backend", "cuda", "-o", tmp_path)


def test_an_unknown_backend_gets_the_backends(files):
    message = error_of("run", files.schedule, "--backend", "tpu")
    assert "auto, cpu, cuda" in message


def test_without_torch_the_message_says_how_to_install_it(files, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "torch", None)
    for command in (("run", files.schedule), ("probe",), ("demo",)):
        assert "twinstream[executor]" in error_of(*command)


def test_run_needs_a_schedule_or_what_to_plan():
    assert "--model and --seq-len" in error_of("run", "--backend", "cpu")


def test_run_takes_no_plan_options_beside_a_schedule(files):
    message = error_of("run", files.schedule, "--backend", "cpu", "--device-mem", "1GiB")
    assert "--device-mem" in message


def test_a_run_that_memory_cannot_hold_is_refused_at_once(files, monkeypatch):
    from twinstream.executor.memory import host_limits

    limits = host_limits.HostLimits(None, None, available_bytes=2**20)
    monkeypatch.setattr(host_limits, "host_limits", lambda: limits)
    assert "1.00 MiB are free" in error_of("run", files.schedule, "--backend", "cpu")


def test_texts_and_tokenizers_that_cannot_be_used_are_named(files, tmp_path):
    run = ("run", files.schedule, "--backend", "cpu")
    missing, short = tmp_path / "missing", tmp_path / "short"
    short.write_text("x")
    assert str(missing) in error_of(*run, "--text", missing)
    assert "at least 2" in error_of(*run, "--text", short)
    assert str(missing) in error_of(*run, "--tokenizer", missing)
    assert "no tokenizer.json" in error_of(*run, "--tokenizer", files.schedule)


def test_mfu_of_an_unknown_machine_is_asked_for(files, tmp_path):
    path = damaged(files, tmp_path, "machine", "name", value="my-box")
    message = error_of("compare", path, files.predicted, files.measured)
    assert "'my-box'" in message
    assert "--machine" in message


def test_errors_go_to_stderr_in_json_mode_too():
    assert error_of("plan", *TINY_STEP, "--machine", "nope", "--json").startswith("error: ")


def test_unknown_kernels_are_refused_with_those_there_are():
    message = error_of("plan", *TINY_STEP, "--machine", "cpu", "--kernels", "cutlass")
    assert "'cutlass' is unknown; known: auto, eager, triton" in message


def test_a_schedule_of_kernels_that_cannot_run_here_says_what_to_plan_with(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    path = tmp_path / "plan.json"
    planned = call("plan", *TINY_STEP, "--machine", "h100", "--policy", "resident", "-o", path)
    assert planned.code == 0, planned.err
    message = error_of("run", path, "--backend", "cpu")
    assert "the schedule has triton kernels" in message
    assert "plan with --kernels eager" in message


@pytest.mark.parametrize("size", ["80GiB", "120%", str(25 * 2**30)])
def test_a_cap_beyond_the_machine_is_refused_with_both_numbers(size):
    step = ("plan", "--model", "1b", "--seq-len", 2048, "--tokens-per-step", 32768)
    message = error_of(*step, "--machine", "rtx3090", "--device-mem", size)
    assert "more than rtx3090 has, 24.00 GiB" in message
    assert "device_memory_bytes = " in message


def test_what_would_do_but_the_machine_lacks_is_said():
    step = ("plan", "--model", "8b", "--seq-len", 8192, "--tokens-per-step", 65536)
    message = error_of(*step, "--machine", "rtx3090", "--policy", "resident")
    assert "of device memory (this one has 24.000 GiB)" in message
    assert "--device-mem" not in message.split("What would do")[1]


@pytest.mark.parametrize("size", ["130GiB", "120%", str(140 * 2**30)])
def test_a_host_cap_beyond_the_machine_is_refused_with_both_numbers(size):
    step = ("plan", "--model", "1b", "--seq-len", 2048, "--tokens-per-step", 32768)
    message = error_of(*step, "--machine", "rtx3090", "--host-mem", size)
    assert "more than rtx3090 has, 128.00 GiB" in message
    assert "--host-mem" in message and "host_memory_bytes = " in message


def test_a_bare_number_that_can_be_no_size_is_asked_about():
    message = error_of(*PLAN, "--device-mem", "24")
    assert "24GiB" in message
    assert "24B" in message


def test_a_bare_number_of_a_sweep_is_asked_about_too(tmp_path):
    file = tmp_path / "bare.toml"
    file.write_text(
        '[fixed]\nmodel = "tiny"\nmachine = "cpu"\nseq_len = 64\n[axes]\ndevice_mem = [6, 8]\n'
    )
    assert "'6' is so many bytes; write 6GiB" in error_of("sweep", file, "-o", tmp_path / "rows")


def test_a_change_without_a_percent_sign_is_not_taken_for_a_thousand_percent():
    step = ("--model", "tiny", "--machine", "h100", "--seq-len", 64, "--tokens-per-step", 256)
    message = error_of("whatif", *step, "--changes", "10")
    assert "the change '10' has no %: write 10% or 1000%" in message


def test_more_steps_cannot_be_timed_than_are_run():
    step = ("--model", "tiny", "--seq-len", 64, "--tokens-per-step", 256, "--backend", "cpu")
    message = error_of("run", *step, "--steps", 4, "--timed-steps", 100)
    assert "--timed-steps 100 of --steps 4" in message


@pytest.mark.parametrize(
    "asked", [("--tokens-per-step", 10**17), ("--optimizer-overhead", "0.0000001")]
)
def test_a_step_too_large_for_any_schedule_is_refused_at_once(asked):
    step = ("--model", "8b", "--seq-len", 8192 if "over" in asked[0] else 10**5)
    message = error_of("plan", *step, "--machine", "h100", *asked)
    assert "blocks" in message
    assert "500,000" in message


@pytest.mark.parametrize(
    ("chunk", "told"), [(64, "a step of 4 chunks of 64 tokens; 2 or 4"), (32, "8 chunks of 32")]
)
def test_chunks_a_round_that_do_not_fit_are_told_the_nearest_that_do(chunk, told):
    message = error_of(*PLAN, "--chunk-tokens", chunk, "--chunks-per-round", 3)
    assert told in message
    assert "2 or 4 would" in message


def test_a_schedule_for_another_machine_of_the_same_name_is_not_run_on_the_shipped_one(tmp_path):
    mine, schedule = tmp_path / "mine.toml", tmp_path / "schedule.json"
    mine.write_text('base = "cpu"\nname = "cpu"\nhbm_bytes_per_s = 10e9\n')
    made = call("plan", *TINY_STEP, "--machine", mine, "--policy", "resident", "-o", schedule)
    assert made.code == 0, made.err
    message = error_of("simulate", schedule)
    assert "another 'cpu'" in message
    assert "--machine" in message
    assert call("simulate", schedule, "--machine", "cpu").code == 0


def test_a_schedule_that_does_not_fit_a_machine_is_simulated_and_that_is_said(files, tmp_path):
    small = tmp_path / "small.toml"
    small.write_text('base = "cpu"\ndevice_memory_bytes = 2e6\n')
    told = call("simulate", files.schedule, "--machine", small)
    assert "does not fit there" in told.out
    missing = call("simulate", files.schedule, "--machine", small, "--json").json()
    assert missing["device_memory_missing_bytes"] > 0
    assert "does not fit" not in call("simulate", files.schedule).out


def test_a_predicted_timeline_is_not_calibrated_to(files):
    given = ("--base", "cpu", "--schedule", files.schedule, "--timeline", files.predicted)
    message = error_of("calibrate", *given)
    assert "simulated, not measured" in message
    assert "--timeline" in message


def test_a_timeline_of_another_machine_is_not_calibrated_to(files, tmp_path):
    output = tmp_path / "fitted.toml"
    given = ("--base", "h100", "--schedule", files.schedule, "--timeline", files.measured)
    assert "no profile of the machine of the timeline" in error_of(
        "calibrate", *given, "-o", output
    )
    assert not output.exists()


def test_the_nominal_size_of_a_card_is_all_it_has():
    step = ("plan", "--model", "1b", "--seq-len", 2048, "--tokens-per-step", 8192)
    named, whole = (
        call(*step, "--machine", "rtx4090", "--effort", "quick", *cap, "--json").json()
        for cap in (("--device-mem", "24GiB"), ())
    )
    assert named["caps"] == whole["caps"]
    assert "23.99 GiB" in error_of(*step, "--machine", "rtx4090", "--device-mem", "24.3GiB")
