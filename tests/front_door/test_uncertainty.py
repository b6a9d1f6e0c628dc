"""What is said of how far a prediction may be off."""

from twinstream.hardware_profiles.loader import load_machine, load_machine_text, override
from twinstream.hardware_profiles.schema import ExpectedError
from twinstream.schedule.timeline import PassSpans, Provenance, Timeline
from twinstream.uncertainty import steady_notes, uncertainty_of


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


def timeline_of(kind, period_passes):
    spans = PassSpans(start_ns=(0,), end_ns=(5,))
    return Timeline(
        op_ids=("a",), passes=(spans,), cold=spans, step_ns=5.0, period_passes=period_passes,
        provenance=Provenance(kind=kind, where="a test"),
    )  # fmt: skip


def test_a_predicted_step_without_a_period_says_so():
    (note,) = steady_notes(timeline_of("simulated", None))
    assert "within 32 passes" in note and "not proven" in note
    assert steady_notes(timeline_of("simulated", 2)) == ()
    assert steady_notes(timeline_of("measured", None)) == ()  # measured steps are what they are
