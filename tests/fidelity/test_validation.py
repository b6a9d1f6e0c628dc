"""Tables are validated by distinct schedules; what cannot be compared is told."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from tests.front_door.command_line import call, error_of
from twinstream.fidelity.measured import Predicted
from twinstream.fidelity.rows import TableRow
from twinstream.fidelity.scoring import ScoredRow, errors_of
from twinstream.fidelity.validation import ScoredLine, TableReport, validate
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.measured_table import MeasuredRow, read_measured
from twinstream.schedule.errors import TwinstreamError

FEW = Path(__file__).parents[1] / "data" / "measured_few.csv"
VALIDATE = ("validate", "--measured", FEW, "--jobs", "1")


@pytest.fixture(scope="module")
def validation() -> TableReport:
    machines = [load_machine(name) for name in ("h100", "rtx3090")]
    return validate(read_measured(FEW), machines, jobs=1)


def validated(schedule: int, measured: float, predicted: float) -> ScoredLine:
    row = MeasuredRow(
        line=1, machine="H100", model="8B", seq_len=512, host_mem_gib=1.0, dev_mem_gib=1.0,
        tokens_per_s=measured, status="ok", columns={},
    )  # fmt: skip
    found = Predicted(step_s=1.0, tokens_per_s=predicted, stall=0.0)
    return ScoredRow(TableRow(row), found, schedule)


def test_errors_count_each_schedule_once():
    # Schedule 0: 101 of mean 100 measured; schedule 1: 40 % too slow.
    rows = [validated(0, 99.0, 101.0), validated(0, 101.0, 101.0), validated(1, 100.0, 60.0)]
    errors = errors_of(rows)
    assert errors.count == 2
    assert errors.mean_error == pytest.approx((0.01 + 0.40) / 2)
    assert errors.median_error == pytest.approx(0.205)
    assert errors.p90_error == pytest.approx(0.01 + 0.9 * 0.39)
    assert errors.max_error == pytest.approx(0.40)
    assert errors_of([]).mean_error is None


def test_a_table_of_two_machines_takes_the_profile_of_each(validation):
    assert len(validation.compared) == 7
    assert validation.overall.count == 6  # two caps change nothing
    assert list(validation.by_model) == ["H100 1B", "H100 8B", "RTX3090 8B"]
    assert {name: e.count for name, e in validation.by_seq_len.items()} == {
        "512": 1, "8192": 5
    }  # fmt: skip
    assert len(validation.failed) == validation.refused_alike == 3
    assert validation.left_out == 0


def test_a_prediction_is_in_the_order_of_what_was_measured(validation):
    """Datasheet profiles with assumed efficiencies; the fitted ones are tested on their own."""
    for each in validation.rows:
        assert each.error is None or abs(each.error) < 0.15, each


def test_profiles_whose_machine_the_table_lacks_are_told():
    rows = [row for row in read_measured(FEW) if row.machine == "RTX3090"]
    machines = [load_machine(name) for name in ("rtx3090", "h100", "a100")]
    found = validate(rows, machines, jobs=1)
    assert len(found.compared) == 2
    assert found.without_rows == ("h100", "a100")
    notes = io.StringIO()
    Console(file=notes, width=200).print(found.screen())
    assert "The table has no rows for h100, a100." in notes.getvalue()


def test_a_profile_of_any_name_takes_a_table_of_one_machine_or_the_rows_of_its_datasheet():
    mine = load_machine("rtx3090").model_copy(update={"name": "mine"})
    rows = [row for row in read_measured(FEW) if row.machine == "RTX3090"]
    assert len(validate(rows, [mine], jobs=1).compared) == 2
    found = validate(read_measured(FEW), [mine], jobs=1)
    assert (len(found.compared), found.left_out) == (2, 7)
    assert len(found.failed) == found.refused_alike == 1


def test_processes_find_what_one_finds(validation):
    machines = [load_machine(name) for name in ("h100", "rtx3090")]
    begun: list[tuple[str, int]] = []
    advanced: list[str] = []

    def start(what: str, total: int):
        begun.append((what, total))
        return lambda: advanced.append(what)

    found = validate(read_measured(FEW), machines, jobs=2, on_start=start)
    assert found.rows == validation.rows and found.json() == validation.json()
    assert begun == [("sizing", len(found.rows)), ("predicting", 6)]
    assert advanced == ["sizing"] * len(found.rows) + ["predicting"] * 6


def test_rows_of_models_that_nobody_knows_are_counted_and_left_out():
    rows = [row for row in read_measured(FEW) if row.machine == "RTX3090"]
    models = {"405B": "unknown model '405b'", "tiny-qwen3": "'tiny-qwen3' is not one"}
    odd = [rows[0].model_copy(update={"line": 100 + i, "model": m}) for i, m in enumerate(models)]
    found = validate([*rows, *odd], [load_machine("rtx3090")], jobs=1)
    assert len(found.compared) == 2
    assert list(found.unknown.values()) == [1, 1]
    for told, wanted in zip(found.unknown, models.values(), strict=True):
        assert wanted in told
    with pytest.raises(TwinstreamError, match="1 rows: unknown model '405b'"):
        validate(odd[:1], [load_machine("rtx3090")], jobs=1)


def test_rows_that_ran_but_are_refused_are_counted():
    rows = [row for row in read_measured(FEW) if row.machine == "RTX3090"]
    small = rows[0].model_copy(update={"line": 100, "dev_mem_gib": 1.0})
    found = validate([*rows, small], [load_machine("rtx3090")], jobs=1)
    assert (len(found.compared), len(found.refused), len(found.failed)) == (2, 1, 1)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_profile_that_lacks_a_number_is_told_from_whatever_process(jobs):
    machines = [load_machine(name) for name in ("h100", "rtx3090")]
    lacking = [m.model_copy(update={"pcie_h2d_bytes_per_s": None}) for m in machines]
    with pytest.raises(TwinstreamError, match="has no pcie_h2d_bytes_per_s"):
        validate(read_measured(FEW), lacking, jobs=jobs)


def test_the_command_prints_the_named_figures_as_json(tmp_path):
    csv, html = tmp_path / "rows.csv", tmp_path / "scatter.html"
    printed = call(*VALIDATE, "--machine", "rtx3090", "--json", "-o", csv, "--html", html).json()
    assert 0 < printed["median_error"] <= printed["p90_error"] <= printed["max_error"] < 0.15
    assert printed["mean_error"] == pytest.approx(printed["median_error"])  # of two schedules
    assert (printed["cells"], printed["schedules"]) == (2, 2)
    assert printed["stalled_mean_error"] is None or printed["stalled_mean_error"] > 0
    lines = csv.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 4 and lines[0].startswith("machine,model,seq_len")
    assert lines[1].split(",")[8] == "972.320618"
    page = html.read_text(encoding="utf-8")
    assert "predicted and measured tokens/s are equal" in page
    assert "972" in page and "RTX3090 8B" in page


def test_the_command_prints_a_table_for_people():
    printed = call(*VALIDATE, "--machine", "rtx3090").out
    assert "2 measured cells, 2 distinct schedules" in printed
    assert "1 of 1 failed cells are refused for the recorded reason" in printed
    assert "7 rows are of machines without a profile here" in printed


def test_only_some_rows_are_validated():
    only = ("--only", "machine=RTX3090", "--only", "seq_len=512")
    printed = call(*VALIDATE, "--machine", "rtx3090", *only, "--json").json()
    assert list(printed["by_seq_len"]) == ["512"]
    assert printed["left_out"] == 0


def test_what_cannot_be_validated_is_told(tmp_path):
    assert "RTX3090" in error_of(*VALIDATE, "--machine", "a100")
    assert "rows of H100, RTX3090, the profiles given are cpu" in error_of(
        *VALIDATE, "--machine", "cpu"
    )
    missing = tmp_path / "none.csv"
    assert "none.csv" in error_of("validate", "--machine", "h100", "--measured", missing)
    failed = tmp_path / "failed.csv"
    header = "machine,model,seq_len,host_mem_gib,dev_mem_gib,tokens_per_s"
    failed.write_text(f"{header}\nH100,8B,8192,1,1,\n", encoding="utf-8")
    assert "nothing to compare" in error_of("validate", "--machine", "h100", "--measured", failed)
    unknown = tmp_path / "unknown.csv"
    unknown.write_text(f"{header}\nH100,9B,8192,1,1,5\n", encoding="utf-8")
    assert "9b" in error_of("validate", "--machine", "h100", "--measured", unknown)
