"""What a command reads it does not write over, and of two outputs neither replaces the other."""

import pytest

from tests.front_door.command_line import TINY_STEP, call, error_of
from tests.front_door.conftest import Files


@pytest.mark.parametrize("command", ["simulate", "report", "trace"])
def test_a_command_does_not_write_over_its_schedule(command, files: Files, tmp_path):
    mine = tmp_path / "mine.json"
    mine.write_bytes(files.schedule.read_bytes())
    other_name = tmp_path / "link.json"
    other_name.symlink_to(mine)
    for output in (mine, other_name):
        message = error_of(command, mine, "--machine", "cpu", "-o", output)
        assert str(output) in message
        assert "another file" in message
    assert mine.read_bytes() == files.schedule.read_bytes()
    assert call(command, mine, "--machine", "cpu", "-o", tmp_path / "new.json").code == 0


def test_a_plan_does_not_write_over_the_plan_that_is_known(files: Files, tmp_path):
    mine = tmp_path / "mine.json"
    mine.write_bytes(files.schedule.read_bytes())
    known = ("--warm-start", files.schedule, "--warm-start", mine)
    assert str(mine) in error_of("plan", *TINY_STEP, "--machine", "cpu", *known, "-o", mine)


def test_a_profile_is_not_written_over_the_machine_it_was_to_be_fitted_from(tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("machine\n")
    before = table.read_text()
    assert str(table) in error_of("validate", "--machine", "cpu", "--measured", table, "-o", table)
    assert table.read_text() == before


@pytest.mark.parametrize("name", ["9" * 5000, "with\0null"])
def test_what_can_be_no_file_is_no_input(name, tmp_path):
    output = tmp_path / "plan.json"
    output.write_text("mine")
    step = ("--seq-len", 64, "--tokens-per-step", 256, "--machine", "cpu")
    error_of("plan", "--model", name, *step, "-o", output)
    assert output.read_text() == "mine"


def test_two_outputs_do_not_share_a_file(tmp_path):
    table, out = tmp_path / "table.csv", tmp_path / "out"
    table.write_text("machine\n")
    given = ("validate", "--machine", "cpu", "--measured", table, "-o", out, "--html", out)
    assert "twice" in error_of(*given)
