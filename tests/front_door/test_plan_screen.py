"""`plan` on one screen, and tokens per step left open."""

import json

import pytest

import twinstream as ts
from tests.front_door.command_line import TINY_STEP, call
from twinstream.hardware_profiles.loader import load_machine, override
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import HOST
from twinstream.screens.plan_screen import plan_notes

PLAN = ("plan", *TINY_STEP, "--machine", "cpu")
TIGHT = ("--device-mem", "6MiB")
OPEN = ("plan", "--model", "tiny", "--machine", "cpu", "--seq-len", 64, "--policy", "resident")


def test_what_is_assumed_and_a_host_taken_whole_are_said():
    plan = ("plan", "--model", "1b", "--seq-len", 2048, "--tokens-per-step", 8192)
    fitted = call(*plan, "--machine", "h100", "--attention", "flash3", "--json").json()
    recipe, error, usual = fitted["notes"]
    assert "flash3 is assumed of h100" in usual
    assert "attention flash3" in recipe and fitted["why_not_here"] in recipe
    assert "\n" not in error  # only screens wrap
    assert "+/- 1.0 %, worst 7.8 %" in error and fitted["uncertainty"]["mean"] == 0.0104
    tight = ("--device-mem", "8GiB", "--host-mem", "20GiB", "--policy", "streaming")
    roomy = call(*plan, "--machine", "rtx4090", *tight, "--json").json()
    _, assumed, rate = roomy["notes"]
    assert "no rate of attention sdpa_flash" in " ".join(rate.split())
    assert "borrowing what kernels reach" in " ".join(assumed.split())
    assert roomy["uncertainty"]["kind"] == "borrowed"
    schedule = ts.plan(
        "1b", "rtx4090", step=ts.TrainingStep(seq_len=2048, tokens_per_step=8192),
        policy="streaming", device_mem="8GiB",
    )  # fmt: skip
    pinned, timeline = arena_bytes(schedule, HOST), ts.simulate(schedule, "rtx4090")
    for more, told in ((1.2, False), (1.05, True)):
        machine = override(load_machine("rtx4090"), {"host_memory_bytes": more * pinned})
        notes = plan_notes(schedule, machine, timeline)
        assert any("are pinned" in note for note in notes) == told
    unproven = timeline.model_copy(update={"period_passes": None})
    told_of = " ".join(" ".join(plan_notes(schedule, machine, unproven)).split())
    assert "not proven" in told_of


@pytest.mark.parametrize("policy", ["optimal", "streaming", "layer_offload"])
def test_a_plan_is_explained_on_one_screen(policy):
    outcome = call(*PLAN, *TIGHT, "--policy", policy)
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    assert len(lines) <= 40
    for part in (
        "step time", "tokens/s", "MFU, HFU", "lower bound", "limited by", "compute waits",
        "copied per step", "recomputed", "optimizer_state", "taken", "cap",
    ):  # fmt: skip
        assert part in outcome.out
    assert f"policy {policy}" in lines[0]


def test_no_size_is_shown_as_nothing():
    outcome = call(*PLAN, *TIGHT, "--policy", "streaming")
    (inputs,) = (line for line in outcome.out.splitlines() if line.startswith("input"))
    assert "KiB" in inputs
    assert " 0.00 " not in outcome.out.partition("Memory at its fullest")[2].partition("taken")[0]


def test_the_json_has_the_numbers_of_the_screen():
    document = call(*PLAN, *TIGHT, "--json").json()
    found = document["explanation"]
    assert found.keys() == {
        "limits", "compute_idle_fraction", "step_fractions", "copied_bytes", "recomputed",
        "residence", "prices",
    }  # fmt: skip
    residence = found["residence"]
    taken = sum(role["device_peak_bytes"] for role in residence["roles"])
    taken += residence["device_unused_bytes"] + residence["device_reserve_bytes"]
    assert taken == document["device_peak_bytes"]
    assert document["gap"] == pytest.approx(
        document["step_time_s"] / document["bound"]["step_s"] - 1
    )
    family_s = document["bound"]["family_step_s"]
    assert document["gap_family"] == pytest.approx(document["step_time_s"] / family_s - 1)
    assert document["gap_family"] >= document["gap"] - 1e-9


@pytest.mark.parametrize(("model", "unit"), [("tiny", "MiB"), ("8b", "GiB")])
def test_a_unit_of_memory_is_never_said_to_save_more_than_the_step(model, unit):
    tight = {"tiny": ("64", "256", "4MiB", "12MiB"), "8b": ("2048", "8192", "24GiB", "100GiB")}
    names = "--seq-len", "--tokens-per-step", "--device-mem", "--host-mem"
    options = [part for pair in zip(names, tight[model], strict=True) for part in pair]
    machine = {"tiny": "cpu", "8b": "h100"}[model]
    command = ("plan", "--model", model, "--machine", machine, *options, "--effort", "quick")
    outcome = call(*command)
    assert f"one more {unit} of device memory" in outcome.out, outcome.err
    explained = call(*command, "--json").json()
    prices = explained["explanation"]["prices"]
    [price] = [one for one in prices if one["what"] == "GiB of device memory"]
    share = 1.0 if unit == "GiB" else 2**-10
    assert share * price["saves_s_per_step"] < explained["step_time_s"]
    assert f"+{share * price['adds_tokens_per_s']:,.1f} tokens/s" in outcome.out


@pytest.mark.parametrize(("share", "chunk"), [(0.01, 128), (0.02, 64)])
def test_the_tokens_proposed_keep_the_optimizer_at_its_share(share, chunk):
    """Of a step of R rounds, what is beyond R times what one more round takes."""
    fixed = ("--chunk-tokens", chunk, "--chunks-per-round", 1)
    overhead = ("--optimizer-overhead", f"{share:%}")
    document = call(*OPEN, *fixed, *overhead, "--json").json()
    rounds = document["workload"]["rounds_per_step"]
    assert rounds > 5
    more = call(*OPEN, *fixed, "--tokens-per-step", (rounds + 1) * chunk, "--json").json()
    round_s = more["step_time_s"] - document["step_time_s"]
    measured = 1 - rounds * round_s / document["step_time_s"]
    assert measured == pytest.approx(share, rel=0.1)


def test_a_larger_share_needs_fewer_tokens_and_the_default_is_1_percent():
    fixed = ("--chunk-tokens", 64, "--chunks-per-round", 1, "--json")

    def rounds(*overhead: str) -> int:
        workload = json.loads(call(*OPEN, *fixed, *overhead).out)["workload"]
        return int(workload["rounds_per_step"])

    few, default, many = (
        rounds(*option)
        for option in (("--optimizer-overhead", "4%"), (), ("--optimizer-overhead", "0.005"))
    )
    assert rounds("--optimizer-overhead", "0.01") == default
    assert few < default < many
    assert many == pytest.approx(2 * default, rel=0.1)


def test_open_tokens_are_whole_rounds_of_fixed_chunks():
    step = ("--chunk-tokens", 512, "--chunks-per-round", 4, "--optimizer-overhead", "0.1%")
    work = call(*OPEN, *step, "--json").json()["workload"]
    assert work["chunks_per_round"] == 4
    assert work["rounds_per_step"] > 1


def test_the_share_holds_within_the_caps_and_rounds_can_be_merged():
    step = ts.TrainingStep(seq_len=8192)
    plenty, tight = (
        ts.Planner(ts.steady_state)
        .prepared(ts.PlanRequest.of("8b", "h100", step=step, device_mem=f"{gib}GiB"))
        .step.tokens_per_step
        for gib in (78, 24)
    )
    # state that streams over PCIe takes longer than state in HBM
    assert plenty < tight
    assert tight // 8192 % 4 == 0
