"""`--attention`: what is planned with, and what is told where that cannot be."""

import json
import re
from dataclasses import replace
from importlib.metadata import PackageNotFoundError

import pytest

import twinstream as ts
from tests.front_door.command_line import TINY_STEP, call, error_of
from twinstream.hardware_profiles.loader import load_machine, override, save_machine
from twinstream.hardware_profiles.schema import AttentionChoice, Efficiency, Machine
from twinstream.measures.missing_attention import missing_attention_notes
from twinstream.models.kernel_costs import attention_libraries
from twinstream.models.kernel_costs.attention_limits import UnknownAttentionError
from twinstream.models.presets import load_preset
from twinstream.models.recipe import KernelChoice, Recipe
from twinstream.planner.kernel_choice import UnsuitableAttentionError, attention_for

SPEC = load_preset("8b")


def naming(attention: str) -> Machine:
    choice = AttentionChoice(name=attention, kind="measured", source="a test")
    return load_machine("h200").model_copy(update={"attention": choice})


@pytest.mark.parametrize(
    ("machine", "changes", "chosen"),
    [
        (load_machine("cpu"), {}, "eager"),
        (load_machine("h100"), {}, "flash3"),
        (load_machine("h100"), {"head_dim": 256}, "sdpa_flash"),
        (load_machine("h200"), {}, "cudnn_frontend"),
        (load_machine("b200"), {}, "flash4"),
        (load_machine("rtx4090"), {}, "sdpa_flash"),
        (naming("flash4"), {}, "flash4"),
        (naming("flash4"), {"head_dim": 256}, "sdpa_flash"),
        (naming("flash4"), {"dtype": "float32"}, "eager"),
        (load_machine("h200"), {"head_dim": 20}, "eager"),
    ],
)
def test_auto_is_the_first_that_computes_the_model(machine, changes, chosen):
    assert attention_for(machine, SPEC.model_copy(update=changes)) == chosen


def test_auto_leaves_out_what_is_not_made_for_the_device():
    hopper = AttentionChoice(name="flash3", kind="measured", source="a test")
    ada = load_machine("rtx4090").model_copy(update={"attention": hopper})
    assert attention_for(ada, SPEC) == "sdpa_flash"
    unstated = ada.model_copy(update={"compute_capability": None})
    assert attention_for(unstated, SPEC) == "flash3"


@pytest.mark.parametrize(
    ("installed", "machine", "chosen"),
    [
        (("flash-attn-4", "flash-attn-3"), "h100", "flash3"),
        (("flash-attn-4",), "b200", "flash4"),
        (("flash-attn-3",), "h100", "flash3"),
        (("flash-attn-3",), "b200", "sdpa_flash"),
        (("flash-attn-4", "flash-attn-3"), "a100", "sdpa_flash"),
        (("flash-attn", "nvidia-cudnn-frontend"), "h100", "sdpa_flash"),
    ],
)
def test_what_is_installed_decides_where_the_step_is_computed_and_nowhere_else(
    installed, machine, chosen, monkeypatch
):
    def version(name):
        if name not in installed:
            raise PackageNotFoundError(name)
        return "4.0"

    elsewhere = attention_for(load_machine(machine), SPEC)
    monkeypatch.setattr(attention_libraries, "version", version)
    assert attention_for(load_machine(machine), SPEC, here=True) == chosen
    assert attention_for(load_machine(machine), SPEC) == elsewhere
    assert attention_for(naming("sdpa_flash"), SPEC, here=True) == "sdpa_flash", (
        "what was measured comes first"
    )
    wide = SPEC.model_copy(update={"head_dim": 256})
    assert attention_for(load_machine(machine), wide, here=True) == "sdpa_flash"


def test_what_a_missing_attention_costs_is_said():
    machine, step = load_machine("h100"), ts.TrainingStep(8192, 65_536)
    spec = load_preset("8b").model_copy(update={"num_layers": 2})

    def step_ns(attention):
        kernels = KernelChoice(vector="triton", attention=attention)
        schedule = ts.plan(
            spec, machine, step=replace(step, recipe=Recipe(kernels=kernels)), policy="resident"
        )
        return schedule.only, ts.simulate(schedule, machine).step_ns

    usual, fast_ns = step_ns("flash4")
    slower, slow_ns = step_ns("sdpa_flash")
    (told,) = missing_attention_notes(slower, machine)
    assert "flash-attn-4 is not installed" in told and "not measured by us" in told
    (longer,) = re.findall(r"about (\d+)% longer", told)
    assert int(longer) / 100 == pytest.approx(slow_ns / fast_ns - 1, abs=0.02)
    assert missing_attention_notes(usual, machine) == ()
    assert missing_attention_notes(slower, load_machine("a100")) == ()


def test_auto_takes_none_that_is_called_for_each_of_packed_sequences(tmp_path):
    machine = naming("cudnn_frontend")
    assert attention_for(machine, SPEC) == "cudnn_frontend"
    assert attention_for(machine, SPEC, packed=True) == "sdpa_flash"
    assert attention_for(machine, SPEC, "cudnn_frontend", packed=True) == "cudnn_frontend"
    save_machine(machine, tmp_path / "mine.toml")
    for lengths, chosen in (("512", "cudnn_frontend"), ("300,212", "sdpa_flash")):
        asked = ("plan", "--model", "tiny", "--dtype", "bfloat16", "--seq-len", lengths, "--json")
        for more in ((), ("--kernels", "auto")):
            plan = call(*asked, "--machine", tmp_path / "mine.toml", *more)
            assert plan.json()["kernels"]["attention"] == chosen


def test_auto_takes_for_packed_documents_what_is_fastest_for_their_lengths():
    """Each is 4 / 14 of the FLOPs forward and 10 / 14 backward, at rates that the test states; a
    call for each of many short documents costs more than a faster kernel gains."""
    flop_per_s = {"cudnn_frontend": 4e14, "sdpa_flash": 2e14}
    machine, spec = naming("cudnn_frontend"), load_preset("8b")
    whole = {"half": 0.0, "of": "flops", "kind": "measured", "source": "a test"}
    curves = {
        f"{unit}/{name}": Efficiency(max=rate / machine.rate("peak_bf16_flop_per_s"), **whole)
        for name, rate in flop_per_s.items()
        for unit in ("attention_forward", "attention_backward")
    }
    machine = machine.model_copy(update={"efficiency": machine.efficiency | curves})
    for lengths in ((8192, 4096, 4096), (6000, 5000, 5384), 8 * (1024, 300), 100 * (160, 90)):
        squares = sum(length**2 for length in lengths)
        times = {n: 14 * 4096 * squares / 2 / rate for n, rate in flop_per_s.items()}
        times["cudnn_frontend"] += 2 * len(lengths) * 100e-6
        chosen = attention_for(machine, spec, packed=lengths)
        assert chosen == min(times, key=times.get), lengths
        kept = {key: c for key, c in machine.efficiency.items() if "cudnn_frontend" not in key}
        without = machine.model_copy(update={"efficiency": kept})
        assert attention_for(without, spec, packed=lengths) == "sdpa_flash"


@pytest.mark.parametrize(
    ("attention", "fits", "does_not"),
    [("flash3", "h100", "rtx4090"), ("flash4", "b200", "rtx5090"), ("flash2", "a100", None)],
)
def test_attention_is_refused_for_devices_that_it_is_not_made_for(attention, fits, does_not):
    assert attention_for(load_machine(fits), SPEC, attention) == attention
    if does_not is not None:
        told = "it is for compute capability .*, not"
        with pytest.raises(UnsuitableAttentionError, match=told):
            attention_for(load_machine(does_not), SPEC, attention)


def test_a_hypothetical_machine_keeps_the_choice_of_its_base():
    faster = override(naming("flash4"), {"pcie_h2d_bytes_per_s": 128e9})
    assert attention_for(faster, SPEC) == "flash4"


def test_one_that_does_not_do_is_refused_with_those_that_do():
    told = r"--attention sdpa_cpu does not do for '8b' on 'h200': it runs on cpu, not on cuda"
    with pytest.raises(UnsuitableAttentionError, match=told + r".*these do: eager, sdpa_flash"):
        attention_for(load_machine("h200"), SPEC, "sdpa_cpu")
    with pytest.raises(UnknownAttentionError, match="'fast' is unknown"):
        attention_for(load_machine("h200"), SPEC, "fast")


def test_the_schedule_names_the_attention_it_was_planned_with(tmp_path):
    plan = tmp_path / "plan.json"
    asked = ("plan", *TINY_STEP, "--machine", "cpu", "--policy", "resident", "--json")
    described = call(*asked, "--attention", "sdpa_cpu", "-o", plan).json()
    assert described["kernels"]["attention"] == "sdpa_cpu"
    calls = json.loads(plan.read_text())["calls"].values()
    named = {c["attributes"]["attention"] for c in calls if "attention" in c["attributes"]}
    assert named == {"sdpa_cpu"}
    assert described["caps"]["library_bytes"] > 0
    assert call(*asked).json()["kernels"]["attention"] == "eager"
    assert call("run", plan, "--steps", 2, "--backend", "cpu").code == 0
    assert "eager, attention sdpa_cpu" in call(*asked[:-1], "--attention", "sdpa_cpu").out


def test_a_profile_that_names_an_unknown_attention_is_told_so(tmp_path):
    save_machine(naming("flash9"), tmp_path / "mine.toml")
    step = ("--model", "8b", "--seq-len", 1024, "--machine", tmp_path / "mine.toml")
    assert "'flash9' is unknown" in error_of("plan", *step)


def test_a_run_whose_attention_cannot_run_says_what_to_install(tmp_path):
    plan = tmp_path / "plan.json"
    step = ("--model", "8b", "--seq-len", 64, "--tokens-per-step", 64, "--machine", "h100")
    kernels = ("--kernels", "eager", "--attention", "flash4")
    made = call("plan", *step, "--policy", "resident", *kernels, "-o", plan)
    assert made.code == 0, made.err
    told = " ".join(error_of("run", plan, "--backend", "cpu").split())
    assert "'flash4' cannot run here" in told
    assert "it runs on cuda, not on cpu. On this machine's cpu can: eager, sdpa_cpu" in told


def test_a_table_of_attention_with_an_unknown_field_is_told_the_known_ones(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "h100"\n[attention]\nname = "flash4"\nkind = "measured"\nsauce = "x"\n')
    told = error_of("plan", *TINY_STEP, "--machine", path)
    assert "unknown field 'attention.sauce': did you mean 'source'?" in " ".join(told.split())
