"""The Python front door, as the README shows it."""

from dataclasses import replace

import pytest
import torch

import twinstream as ts
from tests.front_door.command_line import call
from twinstream.data.text import byte_tokens, default_text
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.files import read_document
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE, HOST

STEP = ts.TrainingStep(seq_len=64, tokens_per_step=256)


@pytest.mark.parametrize(
    ("model", "machine", "step", "caps"),
    [
        ("tiny", "cpu", ts.TrainingStep(64, 256), {"device_mem": "6MiB"}),
        ("1b", "h100", ts.TrainingStep(2048, 8192), {"device_mem": "8GiB", "host_mem": "64GiB"}),
    ],
)
def test_python_and_the_command_line_plan_alike(model, machine, step, caps, tmp_path):
    path = tmp_path / "plan.json"
    named = [(f"--{name.replace('_', '-')}", size) for name, size in caps.items()]
    flags = [part for pair in named for part in pair]
    words = ("--seq-len", step.seq_len, "--tokens-per-step", step.tokens_per_step)
    assert (
        call("plan", "--model", model, "--machine", machine, *words, *flags, "-o", path).code == 0
    )
    assert read_document(ts.Schedule, path) == ts.plan(model, machine, step=step, **caps)


def test_the_readmes_example_works():
    step = ts.TrainingStep(seq_len=8192, tokens_per_step=8192)
    schedule = ts.plan("8b", "h100", step=step, device_mem="24GiB")
    timeline = ts.simulate(schedule, "h100")
    summary = ts.summarize(schedule, timeline, ts.load_machine("h100"))
    assert ts.verify(schedule) == []
    assert summary.device_peak_bytes <= 24 * 2**30
    assert 0.1 < summary.mfu < 1.0


def test_a_plan_stays_within_its_device_cap():
    schedule = ts.plan("tiny", "cpu", step=STEP, device_mem="6MiB", policy="streaming")
    assert arena_bytes(schedule, DEVICE) <= 6 * 2**20
    assert ts.simulate(schedule, "cpu").step_ns > 0


@pytest.mark.parametrize("policy", ["full_recompute", "optimizer_offload", "layer_offload"])
def test_what_others_do_is_planned_and_simulated_on_the_chain_that_it_needs(policy):
    schedule = ts.plan("tiny", "cpu", step=STEP, policy=policy)
    assert ts.verify(schedule) == []
    reloaded = ts.Schedule.model_validate_json(schedule.model_dump_json())
    assert ts.simulate(reloaded, "cpu").step_ns > 0
    on_host = {call.kernel for call in schedule.calls.values() if call.processor == "host"}
    assert ("adamw_step/host" in on_host) == (policy != "full_recompute")


def edited(schedule, queue, waits_of):
    """The schedule with other waits of its first op on a queue that has some."""
    ops = list(schedule.ops)
    at = next(i for i, op in enumerate(ops) if op.stream.queue == queue and op.waits)
    ops[at] = ops[at].model_copy(update={"waits": waits_of(ops[at], ops)})
    return schedule.model_copy(update={"ops": tuple(ops)})


def test_a_schedule_whose_edit_made_it_unsafe_is_not_simulated():
    schedule = ts.plan("tiny", "cpu", step=STEP, device_mem="6MiB", policy="streaming")
    race = edited(schedule, "d2h", lambda op, ops: ())
    with pytest.raises(ts.TwinstreamError, match="without waiting for"):
        ts.simulate(race, "cpu")
    last = schedule.ops[-1].op_id
    circle = edited(schedule, "h2d", lambda op, ops: (*op.waits, last))
    nobody = edited(schedule, "h2d", lambda op, ops: ("nobody",))
    for function in (ts.simulate, ts.steady_state):
        with pytest.raises(ts.TwinstreamError, match=f"neither ever starts: .* '{last}'.* follows"):
            function(circle, ts.load_machine("cpu"))
        with pytest.raises(ts.TwinstreamError, match="'nobody', which is not in the schedule"):
            function(nobody, ts.load_machine("cpu"))


def test_training_is_the_same_whatever_the_caps():
    free = ts.plan("tiny", "cpu", step=STEP, policy="resident")
    tight = ts.plan("tiny", "cpu", step=STEP, device_mem="6MiB", policy="streaming")
    assert free.workload == tight.workload
    settings = ts.RunSettings(backend="cpu", num_steps=2)
    assert ts.execute(free, settings).losses == ts.execute(tight, settings).losses


def test_a_recipe_with_a_float32_master_is_trained_from_a_state_that_has_one():
    spec = ts.load_model("tiny").model_copy(update={"dtype": "bfloat16", "num_layers": 1})
    step = replace(STEP, recipe=Recipe(gradients="float32", optimizer_state="float32_master"))
    schedule = ts.plan(spec, "cpu", step=step, policy="resident")
    run = ts.execute(schedule, ts.RunSettings("cpu", num_steps=2))
    assert 0 < run.losses[1] < run.losses[0]


@pytest.fixture(scope="module")
def six_steps() -> tuple[ts.Schedule, ts.Run]:
    schedule = ts.plan("tiny", "cpu", step=STEP, policy="resident")
    return schedule, ts.execute(schedule, ts.RunSettings("cpu", num_steps=6))


@pytest.mark.parametrize("rest_only", [False, True])
def test_three_steps_and_three_from_their_state_are_six_bit_for_bit(six_steps, rest_only):
    schedule, at_once = six_steps
    tokens = byte_tokens(default_text())
    three = ts.RunSettings("cpu", num_steps=3)
    first = ts.execute(schedule, three, tokens=tokens)
    with pytest.raises(ts.TwinstreamError, match="3 steps behind it: say whether `tokens` begin"):
        ts.execute(schedule, three, tokens=tokens, state=first.state)
    three = replace(three, skip_trained=not rest_only)
    if rest_only:  # the fourth step's tokens are the first of what is left
        tokens = tokens[3 * 256 :]
    then = ts.execute(schedule, three, tokens=tokens, state=first.state)
    assert first.losses + then.losses == at_once.losses
    assert (first.state["step"], then.state["step"]) == (3, 6)
    assert then.state.keys() == at_once.state.keys()
    for name, flat in at_once.state.items():
        assert torch.equal(then.state[name], flat), name


def test_a_state_without_its_step_is_a_fresh_one_and_a_wrong_step_is_refused(six_steps):
    schedule, at_once = six_steps
    settings = ts.RunSettings("cpu", num_steps=1)
    unnumbered = {name: flat for name, flat in at_once.state.items() if name != "step"}
    assert ts.execute(schedule, settings, state=unnumbered).state["step"] == 1
    for wrong in (torch.tensor(-1), torch.tensor(2.5), torch.tensor([1, 2])):
        with pytest.raises(ts.TwinstreamError, match="counts the steps done"):
            ts.execute(schedule, settings, state=at_once.state | {"step": wrong})


def test_losses_are_told_as_they_come():
    told: list[float] = []
    schedule = ts.plan("tiny", "cpu", step=STEP)
    settings = ts.RunSettings(backend="cpu", num_steps=3, on_loss=told.append)
    losses = ts.execute(schedule, settings).losses
    assert tuple(told) == losses
    assert len(losses) == 3


def test_every_error_of_a_user_is_a_twinstream_error():
    for model, machine, options in (
        ("9b", "cpu", {}),
        ("tiny", "h1000", {}),
        ("tiny", "cpu", {"policy": "greedy"}),
        ("tiny", "cpu", {"device_mem": "1MiB"}),
        ("tiny", "cpu", {"device_mem": "much"}),
    ):
        with pytest.raises(ts.TwinstreamError):
            ts.plan(model, machine, step=STEP, **options)


def test_gradients_are_clipped_to_the_norm_asked_for_and_the_norms_are_told():
    step = replace(STEP, recipe=ts.Recipe(clips=True))
    schedule = ts.plan("tiny", "cpu", step=step)
    free, clipped = (
        ts.execute(schedule, ts.RunSettings("cpu", 3, max_norm=norm)) for norm in (0.0, 1e-4)
    )
    assert len(free.norms) == len(clipped.norms) == 3
    assert free.norms[0] == clipped.norms[0] > 1e-4  # before anything was updated
    assert free.losses[0] == clipped.losses[0]
    assert free.losses[1:] != clipped.losses[1:]
    with pytest.raises(ts.TwinstreamError, match="the schedule does not clip: plan with Recipe"):
        ts.execute(ts.plan("tiny", "cpu", step=STEP), ts.RunSettings("cpu", 1, max_norm=1.0))
    for wrong in (-1.0, float("nan"), "1"):
        with pytest.raises(ts.TwinstreamError, match="max_norm"):
            ts.RunSettings(max_norm=wrong)


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(gradients="float32", optimizer_state="float32_master"),
        Recipe(lora=ts.Lora(rank=4, alpha=8.0)),
    ],
)
def test_a_run_that_keeps_no_state_holds_none_beside_its_arenas(recipe, monkeypatch):
    spec = ts.load_model("tiny").model_copy(update={"dtype": "bfloat16", "num_layers": 2})
    schedule = ts.plan(spec, "cpu", step=replace(STEP, recipe=recipe), policy="streaming")
    keeping = ts.RunSettings("cpu", num_steps=2)
    kept = ts.execute(schedule, keeping)
    arenas = sum(arena_bytes(schedule, tier) for tier in (DEVICE, HOST))
    monkeypatch.setenv("TWINSTREAM_AVAILABLE_MEMORY", f"{arenas + 2**10}B")
    with pytest.raises(ts.TwinstreamError, match="set TWINSTREAM_AVAILABLE_MEMORY=SIZE"):
        ts.execute(schedule, keeping)
    without = replace(keeping, keeps_state=False)
    in_arenas = ts.execute(schedule, without)
    assert (in_arenas.losses, in_arenas.state) == (kept.losses, {})
    goes_on = replace(without, skip_trained=True)
    monkeypatch.delenv("TWINSTREAM_AVAILABLE_MEMORY")
    assert (
        ts.execute(schedule, goes_on, state=kept.state).losses
        == ts.execute(schedule, replace(keeping, skip_trained=True), state=kept.state).losses
    )
