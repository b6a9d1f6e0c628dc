"""Every mistake of a user gets one message that helps, exit code 2, and no traceback."""

import json

import pytest

from tests.front_door.command_line import TINY_STEP, call, error_of
from tests.front_door.conftest import Files
from twinstream.hardware_profiles.loader import machine_names
from twinstream.planner.policies import policy_names

PLAN = ("plan", *TINY_STEP, "--machine", "cpu")
LONG = ("plan", "--model", "8b", "--machine", "h100")
SEED = (*LONG, "--policy", "ml_dataflow", "--tokens-per-step", 4608, "--seq-len")
SMALL_CARD = ("plan", "--model", "1b", "--seq-len", 2048, "--machine", "rtx3090")
OPEN = ("plan", "--model", "tiny", "--machine", "cpu", "--seq-len", 64)
WHATIF = ("whatif", *TINY_STEP, "--machine", "cpu")

WRONG = [
    (("pln",), ["pln"]),
    (("plan", "--model", "9b", "--machine", "h100", "--seq-len", 64), ["'9b'", "twinstream model"]),
    (("plan", *TINY_STEP, "--machine", "h1000"), ["'h1000'", *machine_names()]),
    (("plan", *TINY_STEP, "--machine", "nowhere/mine.toml"), ["nowhere/mine.toml"]),
    (("plan", *TINY_STEP[2:], "--machine", "cpu", "--model", "no/config.json"), ["no/config.json"]),
    ((*PLAN, "--policy", "greedy"), ["'greedy'", *policy_names()]),
    (("plan", *TINY_STEP, "--machine", "nope", "--json"), ["error: "]),
    (("plan", "--model", "tiny", "--machine", "cpu"), ["--seq-len"]),
    *(((*PLAN, flag, 0), [flag]) for flag in ("--seq-len", "--tokens-per-step", "--chunk-tokens")),
    *(
        ((*PLAN, flag, size), ["24GiB"])
        for flag in ("--device-mem", "--host-mem")
        for size in ("24XiB", "lots", "-4GiB", "", "9" * 400 + "GiB")
    ),
    *(
        ((*PLAN, "--seq-len", lengths), ["300,212,512"])
        for lengths in ("0", "-5", "long", "", "30,,5", "30,5.5", "9" * 5000)
    ),
    *(
        ((*SMALL_CARD, "--device-mem", size), ["more than rtx3090 has, 24.00 GiB", "= "])
        for size in ("80GiB", "120%", str(25 * 2**30))
    ),
    *(
        ((*SMALL_CARD, "--host-mem", size), ["--host-mem", "more than rtx3090 has, 128.00 GiB"])
        for size in ("130GiB", "120%", str(140 * 2**30))
    ),
    ((*PLAN, "--device-mem", "24"), ["24GiB", "24B"]),
    ((*PLAN, "--gradients", "half"), ["known: model, float32"]),
    ((*PLAN, "--kernels", "cutlass"), ["'cutlass' is unknown; known: auto, eager, triton"]),
    ((*PLAN, "--chunk-tokens", 48), ["48", "64"]),
    ((*PLAN, "--chunk-tokens", 64, "--chunks-per-round", 3), ["4 chunks of 64 tokens; 2 or 4 wo"]),
    ((*PLAN, "--chunk-tokens", 32, "--chunks-per-round", 3), ["8 chunks of 32", "2 or 4 would"]),
    ((*LONG, "--seq-len", 10**5, "--tokens-per-step", 10**17), ["blocks", "500,000"]),
    ((*LONG, "--seq-len", 8192, "--optimizer-overhead", "0.0000001"), ["blocks", "500,000"]),
    ((*PLAN, "--optimizer-state", "4bit"), ["known: model, float32_master, 8bit"]),
    ((*SEED, 4608, "--optimizer-state", "8bit"), ["leave out --gradients and --optimizer-state"]),
    ((*SEED, 4608, "--gradients", "float32"), ["leave out --gradients and --optimizer-state"]),
    ((*SEED, "4096,512"), ["packs sequences of one length, not of 4096, 512 tokens"]),
    ((*PLAN, "--policy", "layer_offload", "--optimizer", "device"), ["leave out --optimizer"]),
    (("whatif", *TINY_STEP, "--machine", "h100", "--changes", "10"), ["'10' has no %: write 10%"]),
    *(
        ((*OPEN, "--optimizer-overhead", share), ["1% or 0.01"])
        for share in ("lots", "0", "2", "100%", "-1%", "nan", "", "%")
    ),
    ((*PLAN, "--optimizer-overhead", "1%"), ["--tokens-per-step"]),
    ((*SEED[:-3], "--seq-len", 1024, "--attention", "flash4"), ["flash4", "leave out"]),
    ((*SEED[:-3], "--seq-len", 1024, "--kernels", "triton"), ["triton", "leave out"]),
    *(
        ((*WHATIF, "--changes", changes), [told])
        for changes, told in (
            ("lots", "-50%,-10%"), ("0%", "not 0"), ("-100%", "more than -100%"),
            ("+10%,+10%", "twice"),
        )
    ),
    *(
        ((*WHATIF, "--target", target), [told])
        for target, told in (
            ("fast", "12000tok/s"), ("120%", "less than 100%"), ("0tok/s", "12000tok/s"),
        )
    ),
    ((*WHATIF, "--policy", "greedy"), ["'greedy'"]),
    ((*WHATIF, "--device-mem", "1MiB"), ["--device-mem"]),
    ((*WHATIF, "--target", "50%", "-o", "chart.html"), ["--target"]),
    (("run", "--backend", "cpu"), ["SCHEDULE"]),
    (("run", *TINY_STEP), ["--model", "twinstream plan ... -o step.json && twinstream run"]),
    (("run", "tiny", "--seq-len=64"), ["--seq-len", "twinstream plan ... -o step.json"]),
    (("run", "--stepz", 3), ["--stepz", "--steps"]),
    (("run", "nowhere.json", "--steps", 4, "--timed-steps", 100),
     ["--timed-steps 100 of --steps 4"]),
    *((command, ["No such file", "nowhere.json"]) for command in (
        ("verify", "nowhere.json"), ("simulate", "nowhere.json"),
        ("run", "--backend", "cpu", "nowhere.json"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "told"), WRONG, ids=lambda given: " ".join(map(str, given))[:60]
)
def test_a_mistake_gets_a_message_that_helps(command, told):
    message = error_of(*command)
    assert all(part in message for part in told), message


CALIBRATE = ("calibrate", "--base", "cpu", "--schedule", "SCHEDULE", "--timeline")
WRONG_WITH_FILES = [
    (("verify", "HALF"), ["half.json", "line 1"]),
    (("simulate", "PREDICTED"), ["is a timeline, not a schedule"]),
    (("compare", "SCHEDULE", "SCHEDULE", "MEASURED"), ["is a schedule, not a timeline"]),
    (("compare", "SCHEDULE", "MEASURED", "PREDICTED"), ["the prediction first"]),
    (("run", "SCHEDULE", "--backend", "tpu"), ["auto, cpu, cuda"]),
    (("run", "SCHEDULE", "--device-mem", "1GiB"), ["--device-mem", "twinstream plan"]),
    (("run", "SCHEDULE", "--ranks", 2), ["--ranks", "twinstream plan"]),
    (("run", "SCHEDULE", "--cluster", "h100_dgx"), ["--cluster", "is of one device"]),
    (("run", "SCHEDULE", "--backend", "cpu", "--text", "no.txt"), ["no.txt"]),
    (("run", "SCHEDULE", "--backend", "cpu", "--text", "SHORT"), ["at least 2"]),
    (("run", "SCHEDULE", "--backend", "cpu", "--tokenizer", "no.json"), ["no.json"]),
    (("run", "SCHEDULE", "--backend", "cpu", "--tokenizer", "SCHEDULE"), ["no tokenizer.json"]),
    ((*CALIBRATE, "PREDICTED"), ["simulated, not measured", "--timeline"]),
    ((*PLAN, "-o", "no/plan.json"), ["no/plan.json"]),
    ((*PLAN, "-o", "FOLDER"), ["not a file"]),
    (("demo", "--machine", "cpu", "-o", "SHORT"), ["short"]),
]


@pytest.mark.parametrize(("command", "told"), WRONG_WITH_FILES)
def test_a_mistake_with_files_gets_a_message_that_helps(command, told, files: Files, tmp_path):
    half, short = tmp_path / "half.json", tmp_path / "short"
    half.write_text('{"tensors": [')
    short.write_text("x")
    known = {
        "SCHEDULE": files.schedule, "PREDICTED": files.predicted, "MEASURED": files.measured,
        "HALF": half, "SHORT": short, "FOLDER": tmp_path,
    }  # fmt: skip
    message = error_of(*(known.get(part, part) for part in command))
    assert all(part in message for part in told), message


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        (("slots", 3, "size_bytes"), "big", "slots.3.size_bytes"),
        (("workload", "rounds_per_step"), 2**40, "workload"),
        (("model", "spec", "dtype"), "int8", "dtype"),
        (("ops", 5, "waits"), ["nobody"], "'nobody'"),
    ],
)
def test_a_damaged_schedule_is_not_used_and_the_place_is_named(place, value, told, files, tmp_path):
    path = damaged(files, tmp_path, *place, value=value)
    assert told in error_of("simulate", path)
    assert told in error_of("run", path, "--backend", "cpu")


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


def test_without_cuda_the_message_says_how_to_run_on_the_cpu(files, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--backend cpu" in error_of("run", files.schedule, "--backend", "cuda")
    assert "--backend cpu" in error_of("demo", "--backend", "cuda")


def test_cuda_without_a_machine_asks_for_one(monkeypatch, tmp_path):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "--machine" in error_of("demo", "--backend", "cuda", "-o", tmp_path)


def test_without_torch_the_message_says_how_to_install_it(files, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "torch", None)
    for command in (("run", files.schedule), ("probe",), ("demo",)):
        assert "twinstream[train]" in error_of(*command)


def test_a_run_that_memory_cannot_hold_is_refused_at_once(files, monkeypatch):
    from twinstream.executor.memory import host_limits

    limits = host_limits.HostLimits(None, None, available_bytes=2**20)
    monkeypatch.setattr(host_limits, "host_limits", lambda: limits)
    assert "1.00 MiB are free" in error_of("run", files.schedule, "--backend", "cpu")


def test_mfu_of_an_unknown_machine_is_asked_for(files, tmp_path):
    path = damaged(files, tmp_path, "machine", "name", value="my-box")
    message = error_of("compare", path, files.predicted, files.measured)
    assert "'my-box'" in message
    assert "--machine" in message


def test_a_schedule_of_kernels_that_cannot_run_here_says_what_to_plan_with(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    path = tmp_path / "plan.json"
    planned = call("plan", *TINY_STEP, "--machine", "h100", "--policy", "resident", "-o", path)
    assert planned.code == 0, planned.err
    message = error_of("run", path, "--backend", "cpu")
    assert "the schedule has triton kernels" in message
    assert "plan with --kernels eager" in message


def test_what_would_do_but_the_machine_lacks_is_said():
    step = ("plan", "--model", "8b", "--seq-len", 8192, "--tokens-per-step", 65536)
    message = error_of(*step, "--machine", "rtx3090", "--policy", "resident")
    assert "of device memory (this one has 24.000 GiB)" in message
    assert "--device-mem" not in message.split("What would do")[1]


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


def test_a_timeline_of_another_machine_is_not_calibrated_to(files, tmp_path):
    """A hundred times slower than this CPU: no machine is like an H100 then."""
    output, slow = tmp_path / "fitted.toml", tmp_path / "slow.json"
    timeline = json.loads(files.measured.read_text())
    timeline["step_ns"] *= 100
    for spans in (*timeline["passes"], timeline["cold"]):
        spans |= {name: [100 * ns for ns in spans[name]] for name in ("start_ns", "end_ns")}
    slow.write_text(json.dumps(timeline))
    given = ("--base", "h100", "--schedule", files.schedule, "--timeline", slow)
    assert "no profile of the machine of the timeline" in error_of(
        "calibrate", *given, "-o", output
    )
    assert not output.exists()
    assert call("calibrate", *given, "-o", output, "--anyway").code == 0
    assert output.exists()


def test_the_nominal_size_of_a_card_is_all_it_has():
    step = ("plan", "--model", "1b", "--seq-len", 2048, "--tokens-per-step", 8192)
    named, whole = (
        call(*step, "--machine", "rtx4090", "--effort", "quick", *cap, "--json").json()
        for cap in (("--device-mem", "24GiB"), ())
    )
    assert named["caps"] == whole["caps"]
    assert "23.99 GiB" in error_of(*step, "--machine", "rtx4090", "--device-mem", "24.3GiB")
