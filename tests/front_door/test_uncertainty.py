"""What is said of how far a prediction may be off."""

from tests.front_door.command_line import call
from twinstream.hardware_profiles.loader import load_machine, load_machine_text, override
from twinstream.hardware_profiles.schema import ExpectedError
from twinstream.sweep.certainty import errors_note, ranking_note
from twinstream.uncertainty import Speed, order_note, uncertainty_of


def test_a_fitted_profile_tells_its_error_on_runs_it_has_not_seen():
    found = uncertainty_of(load_machine("h100"))
    assert (found.kind, found.short) == ("held_out", "+/- 1.0 %")
    assert "worst 7.8 %" in found.sentence and "fidelity" in found.sentence


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
        ("plan", *step, "--policy", "all"),
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
