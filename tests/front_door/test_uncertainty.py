"""What is said of how far a prediction may be off."""

import re

import pytest

import twinstream as ts
from tests.front_door.command_line import call
from twinstream.clusters.predict import document_of
from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of
from twinstream.hardware_profiles.cost import work_time
from twinstream.hardware_profiles.loader import load_machine, load_machine_text, override
from twinstream.hardware_profiles.schema import ExpectedError
from twinstream.measures.published_steps import NearSteps, PublishedStep, StepKind, nearest
from twinstream.measures.uncertainty import (
    Speed,
    Uncertainty,
    order_note,
    rate_notes,
    steady_notes,
    uncertainty_of,
    uncertainty_of_job,
)
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.models.presets import load_preset
from twinstream.models.recipes.recipe import KernelChoice, Recipe
from twinstream.schedule.files import write_document
from twinstream.schedule.timeline import PassSpans, Provenance, RankTimeline
from twinstream.study.sweep.rows import errors_note, ranking_note


def test_a_fitted_profile_tells_its_error_on_runs_it_has_not_seen():
    found = uncertainty_of(load_machine("h100"))
    assert (found.kind, found.short) == ("held_out", "+/- 1.0 %")
    assert "worst 7.8 %" in found.sentence and "accuracy" in found.sentence


def test_a_borrowed_profile_tells_what_borrowing_was_off_by():
    found = uncertainty_of(load_machine("mi300x"))
    assert (found.kind, found.short) == ("borrowed", "+/- 19 %")


def test_nothing_measured_is_unknown_and_not_zero():
    machine = load_machine("h100").model_copy(update={"expected_error": None})
    found = uncertainty_of(machine)
    assert (found.mean, found.kind, found.short) == (None, "unknown", "+/- ?")


def test_hypothetical_numbers_are_named():
    faster = override(load_machine("h100"), {"hbm_bytes_per_s": 4.8e12, "efficiency.matmul": 0.9})
    found = uncertainty_of(faster)
    assert found.hypothetical == ("hbm_bytes_per_s", "efficiency.matmul")
    assert "hypothetical: hbm_bytes_per_s" in found.sentence


def test_the_expected_error_is_no_part_of_a_machine_s_hash_and_survives_its_file():
    machine = load_machine("h100")
    other = ExpectedError(mean=0.5, kind="assumed", source="a test")
    changed = machine.model_copy(update={"expected_error": other})
    assert changed.content_hash == machine.content_hash
    heir = load_machine_text('base = "h100"\nname = "mine"')
    assert heir.expected_error == machine.expected_error


def timeline_of(kind, period_passes):
    spans = PassSpans(start_ns=(0,), end_ns=(5,))
    return RankTimeline(
        op_ids=("a",), passes=(spans,), cold=spans, step_ns=5.0, period_passes=period_passes,
        provenance=Provenance(kind=kind, where="a test"),
    )  # fmt: skip


def test_a_predicted_step_without_a_period_says_so():
    (note,) = steady_notes(timeline_of("simulated", None))
    assert "within 32 passes" in note and "not proven" in note
    assert steady_notes(timeline_of("simulated", 2)) == ()
    assert steady_notes(timeline_of("measured", None)) == ()  # measured steps are what they are


def planned_with(attention, machine="h100"):
    kernels = KernelChoice(vector="triton", attention=attention)
    step = ts.TrainingStep(64, 256, recipe=Recipe(kernels=kernels))
    spec = load_preset("tiny").model_copy(update={"dtype": "bfloat16"})
    return ts.plan(spec, machine, step=step, policy="resident")


def test_a_rate_of_another_implementation_is_told_with_its_assumed_ratio():
    [note] = rate_notes(planned_with("sdpa_flash"), load_machine("h100"))
    assert "h100 has no rate of attention sdpa_flash: it is priced by flash3's" in note
    assert "times 0.46 (forward) and 0.35 (backward)" in note and "not measured by us" in note


def test_where_no_ratio_is_known_that_is_told():
    [note] = rate_notes(planned_with("sdpa_flash"), load_machine("a100"))
    assert "priced by flash3's as it is, since nothing is known" in note


def test_a_profile_that_does_not_say_whose_its_rates_are_is_told_of():
    machine = load_machine("h100")
    curves = {
        key: curve.model_copy(update={"implementation": None})
        for key, curve in machine.efficiency.items()
    }
    nobodys = machine.model_copy(update={"efficiency": curves, "attention": None})
    [note] = rate_notes(planned_with("sdpa_flash"), nobodys)
    assert "does not say whose its rates of attention are" in note


def test_nothing_is_told_of_its_own_rate_nor_of_old_documents():
    machine = load_machine("h100")
    schedule = planned_with("flash3")
    (usual,) = rate_notes(schedule, machine)
    assert usual.startswith("Attention flash3 is assumed of h100: what is usually trained with")
    machine = machine.model_copy(update={"attention": None})
    assert rate_notes(schedule, machine) == []
    calls = {
        name: found.model_copy(
            update={
                "cost": tuple(w.model_copy(update={"implementation": None}) for w in found.cost)
            }
        )
        for name, found in planned_with("sdpa_flash").calls.items()
    }
    assert rate_notes(schedule.model_copy(update={"calls": calls}), machine) == []


def test_simulate_tells_the_rate_on_the_screen_and_in_json(tmp_path):
    path = tmp_path / "plan.json"
    write_document(planned_with("sdpa_flash"), path)
    assert "no rate of attention sdpa_flash" in " ".join(call("simulate", path).out.split())
    _, note = call("simulate", path, "--json").json()["notes"]
    assert "no rate of attention sdpa_flash" in note


def speed(tokens_per_s: float, machine: str) -> Speed:
    return Speed(tokens_per_s, uncertainty_of(load_machine(machine)))


def test_an_order_that_the_errors_leave_open_is_said_to_be_uncertain():
    assert order_note({"h100": speed(1000, "h100"), "rtx3090": speed(500, "rtx3090")}) is None
    open_order = {"mi300x": speed(1100, "mi300x"), "h100": speed(1000, "h100")}
    told = order_note(open_order)
    assert told is not None
    assert "h100 (1,000 +/- 1.0 %) may be as fast as mi300x (1,100 +/- 19 %)" in told
    assert order_note({**open_order, "mi300x": speed(1300, "mi300x")}) is None  # 1,053 at least
    cpu = speed(1, "cpu")
    assert "cpu (1 +/- ?) may be as fast as h100" in str(order_note({"h100": cpu, "cpu": cpu}))


def test_every_screen_that_predicts_says_how_far_it_may_be_off(tmp_path, files):
    step = ("--model", "tiny", "--seq-len", 64, "--tokens-per-step", 256, "--machine", "h100")
    quick = ("--policy", "streaming", "--device-mem", "4GiB")
    few = ("--changes", "+10%", "--jobs", 1)
    for command in (
        ("plan", *step, *quick),
        ("simulate", files.schedule, "--machine", "h100"),
        ("compare", files.schedule, files.predicted, files.measured, "--machine", "h100"),
        ("whatif", *step, *quick, *few),
        ("report", files.schedule, "--machine", "h100", "-o", tmp_path / "report.html"),
    ):
        told = call(*command, "--json").json()["uncertainty"]
        assert (told["mean"], told["worst"], told["kind"]) == (0.0104, 0.0784, "held_out"), command
        if command[0] == "report":
            continue
        out = " ".join(call(*command).out.split())
        assert "+/- 1.0 %, worst 7.8 %: mean error on measured runs" in out, command
    page = (tmp_path / "report.html").read_text()
    assert "predicted, +/- 1.0 %" in page and "worst 7.8 %" in page


def test_a_sweep_of_two_machines_states_their_errors_and_that_the_order_is_open():
    rows = [
        {"status": "ok", "machine": name, "tokens_per_s": speed, "expected_error_mean": mean,
         "expected_error_kind": kind}
        for name, speed, mean, kind in (
            ("h100", "1000", "0.01", "held_out"), ("mi300x", "1100", "0.19", "borrowed"),
            ("mi300x", "900", "0.19", "borrowed"),
        )
    ]  # fmt: skip
    rows.append({"status": "infeasible", "machine": "a100"})
    assert errors_note(rows) == "Predicted: h100 +/- 1.0 %, mi300x +/- 19 %."
    assert errors_note(rows[:1]) == "Predicted, +/- 1.0 %."
    assert "h100 (1,000 +/- 1.0 %) may be as fast as mi300x (1,100" in ranking_note(rows)
    assert ranking_note(rows[:1]) == "" and errors_note(rows[3:]) == ""


def test_attention_at_an_assumed_rate_widens_what_is_said_of_a_schedule():
    """By a quarter of attention's share where a ratio is assumed, by all of it where none is."""
    machine, schedule = load_machine("h100"), planned_with("sdpa_flash")
    total = unsure = 0.0
    for op in schedule.ops:
        if op.kind == "compute":
            for work in schedule.calls[op.call].cost:
                alone_ns = work_time(work, machine).alone_ns
                total += alone_ns
                unsure += alone_ns * work.unit.startswith("attention")
    found = uncertainty_of(machine, schedule)
    assert found.of_attention == pytest.approx(0.25 * unsure / total)
    assert found.mean == pytest.approx(0.0104 + found.of_attention)
    assert "of it for attention" in found.sentence
    assert uncertainty_of(machine, planned_with("flash3")).mean == 0.0104
    nobody_knows = uncertainty_of(load_machine("a100"), planned_with("sdpa_flash", "a100"))
    assert nobody_knows.of_attention > found.of_attention


def job_of(model="llama3-70b", **layout):
    known = {"tp": 8, "pp": 4, "dp": 4, **layout}
    return Job(shape=load_preset(model), layout=Layout(**known), seq_len=4096, global_batch=128)


def never():
    raise AssertionError("a step is near: no schedule is needed")


def test_of_many_gpus_the_published_steps_nearest_say_how_far_off_a_prediction_may_be():
    machine = machine_of(load_cluster("h100_dgx"))
    found = uncertainty_of_job(job_of(), machine, never)
    near = nearest(StepKind.of(job_of()), machine)
    weights = [1 / (1 + step.kind.distance(StepKind.of(job_of()))) for step in near.steps]
    first = near.steps[0].publisher
    known = [(w, s.error) for w, s in zip(weights, near.steps, strict=True) if s.publisher == first]
    bias = sum(w * e for w, e in known) / (sum(w for w, _ in known) + 1)
    assert (found.kind, found.bias) == ("published", pytest.approx(bias))
    assert found.worst == max(abs(step.error - bias) for step in near.steps)
    assert found.symmetric == found.mean + abs(found.bias)
    assert "8 steps of" in found.sentence and "H100" in found.sentence
    assert all(step.kind.parameters > 30e9 and step.gpu == "H100" for step in near.steps)
    distances = [step.kind.distance(StepKind.of(job_of())) for step in near.steps]
    assert distances == sorted(distances)


KIND = StepKind(False, "bf16", 8 * 10**9, 16, frozenset(["tp", "dp"]), False)


def near_of(errors, kind=KIND, away=0.0, series="dgxc H100 bf16"):
    """Of steps that are so far from the question, in order of publication."""
    other = kind._replace(parameters=round(kind.parameters * 2**away))
    steps = [PublishedStep(other, "h100_dgx", "H100", series, f"f{n}", e)
             for n, e in enumerate(errors)]  # fmt: skip
    return NearSteps.of(kind, tuple(steps), "a page", "dgxc")


def test_a_known_bias_is_taken_off_and_little_is_known_of_few():
    """n equal errors at no distance weigh n against 1 for no bias."""
    many, one = near_of([-0.10] * 8), near_of([-0.10])
    assert many.bias == pytest.approx(-0.10 * 8 / 9)
    assert one.bias == pytest.approx(-0.05)
    assert many.worst == pytest.approx(0.10 / 9)
    assert near_of([-0.10] * 8, series="mosaicml H100").bias == 0


def test_a_bar_is_the_spread_about_the_bias_and_grows_with_the_distance():
    errors = [0.06, -0.06] * 4
    near, far = near_of(errors), near_of(errors, away=1)
    assert near.bias == pytest.approx(0)
    assert near.bar == pytest.approx(1.25 * 0.06 * (1 + 1 / 8) ** 0.5)
    assert far.bar == pytest.approx(near.bar * 1.2)


def test_few_steps_or_other_ones_never_narrow_a_bar_below_the_spread_of_their_kind():
    experts = KIND._replace(experts=True)
    assert near_of([0.01] * 4).bar == 0.08 and near_of([0.01] * 5).bar < 0.02
    assert near_of([0.01] * 4, experts).bar == 0.25
    assert near_of([0.01] * 8, experts, away=2.5).bar == 0.25
    assert near_of([0.5, -0.5], experts).bar > 0.25


def test_a_bias_stands_before_its_bar_and_moves_an_interval():
    known = Uncertainty(mean=0.04, worst=None, kind="published", source="", bias=-0.031)
    assert known.short == "-3.1 +/- 4.0 %"
    assert known.model_copy(update={"bias": 0.002}).short == "+/- 4.0 %"
    plain = known.model_copy(update={"bias": 0.0})
    assert Speed(95, plain).may_be_as_fast_as(Speed(100, plain))
    assert not Speed(95, known).may_be_as_fast_as(Speed(104, plain))


def test_of_a_mixture_of_experts_only_such_steps_count():
    machine = machine_of(load_cluster("h100_dgx"))
    kind = StepKind.of(job_of("mixtral-8x7b", tp=1, pp=4, dp=8, ep=8))
    assert kind.experts
    assert {step.kind.experts for step in nearest(kind, machine).steps} == {True}
    like = nearest(kind, machine).steps[0].kind
    dense = like._replace(experts=False, axes=like.axes - {"ep"})
    assert {step.kind.experts for step in nearest(dense, machine).steps} == {False}


def test_the_distance_of_steps_counts_sizes_axes_precision_and_zero():
    kind = StepKind(False, "bf16", 8, 16, frozenset(["tp", "dp"]), False)
    assert kind.distance(kind) == 0
    assert kind.distance(kind._replace(parameters=32)) == 2
    assert kind.distance(kind._replace(gpus=4)) == 0.5 * 2
    assert kind.distance(kind._replace(axes=frozenset(["cp", "dp"]))) == 2
    assert kind.distance(kind._replace(precision="fp8", zero3=True)) == 3


def test_where_nothing_near_was_published_the_profile_s_own_error_counts():
    machine = machine_of(load_cluster("h100_dgx"))
    other = load_machine("mi300x")
    document = document_of(job_of("tiny", tp=1, pp=1, dp=2), load_cluster("h100_dgx"))
    for one in (job_of("tiny", tp=1, pp=1, dp=2), job_of(offload=True)):
        found = uncertainty_of_job(one, machine, lambda: document)
        assert (found.kind, found.mean) == ("held_out", uncertainty_of(machine).mean)
        assert "no step like this on several GPUs of h100_dgx is known" in found.sentence
    assert uncertainty_of_job(job_of(), other, lambda: document).short == "+/- 19 %"


def test_a_cluster_s_document_is_near_to_what_its_job_is_near_to():
    cluster, job = load_cluster("h100_dgx"), job_of("8b", tp=1, pp=1, dp=4)
    machine, document = machine_of(cluster), document_of(job, cluster)
    assert uncertainty_of(machine, document) == uncertainty_of_job(job, machine, never)
    slower = override(machine, {"peak_bf16_flop_per_s": 5e14})
    assert uncertainty_of(slower, document).kind == "held_out"


def test_layouts_say_how_far_off_they_may_be_on_the_screen_and_in_json(tmp_path):
    path = tmp_path / "uncertain_layout.json"
    asked = ("plan", "--cluster", "h100_dgx", "--gpus", "8", "--model", "1b", "--seq-len", "4096",
             "--global-batch", "16", "--tp", "1", "--pp", "1", "--cp", "1",
             "--kernels", "megatron")  # fmt: skip
    document = call(*asked, "--json").json()
    first = document["layouts"][0]["uncertainty"]
    assert first == document["uncertainty"] and first["kind"] == "published"
    shown = call(*asked, "-o", str(path)).out
    assert "Predicted speeds are " in shown and first["bias"] != 0
    said = call("simulate", str(path)).out
    assert re.search(r"tokens/s \(([-+][0-9.]+ )?\+/- [0-9.]+ %\)", said)
    assert call("simulate", str(path), "--json").json()["uncertainty"] == first
    page = tmp_path / "uncertain_layout.html"
    call("report", str(path), "-o", str(page))
    assert re.search(r"predicted, ([-+][0-9.]+ )?\+/- ", page.read_text("utf-8"))


def test_a_profile_that_may_count_one_memory_twice_is_told_of():
    gib = 2.0**30
    machine = load_machine("h100")
    number = machine.device_memory_bytes.model_copy(update={"value": 119 * gib, "kind": "measured"})
    both = {"device_memory_bytes": number, "host_memory_bytes": number}
    twice = machine.model_copy(update=both)
    (usual,) = rate_notes(planned_with("flash3"), machine)
    assert usual.startswith("Attention flash3")
    told, same = rate_notes(planned_with("flash3"), twice)
    assert same == usual and "equally large" in told and "unified_memory_bytes" in told
    one = both | {"unified_memory_bytes": number.model_copy(update={"value": 238 * gib})}
    assert rate_notes(planned_with("flash3"), machine.model_copy(update=one)) == [usual]
