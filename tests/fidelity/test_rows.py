"""Rows of a table by machine, by condition and by a list of cells."""

import pytest

from twinstream.fidelity.rows import candidate_rows, listed_rows, profiles_of, rows_of
from twinstream.hardware_profiles.errors import CalibrationError
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.measured_table import MeasuredTableError, read_measured
from twinstream.hardware_profiles.schema import Machine

TABLE = """machine,model,seq_len,host_mem_gib,dev_mem_gib,tokens_per_s,status
H100,1B,512,16,16,9000,ok
H100,8B,512,60,24,4000,ok
H100,8B,512,75,78,5000,ok
H100,8B,1024,60,24,,failed
RTX3090,8B,512,64,18,700,ok
"""


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(TABLE)
    return read_measured(path)


H100, CPU = load_machine("h100"), load_machine("cpu")


def called(machine: Machine, name: str) -> Machine:
    return machine.model_copy(update={"name": name})


@pytest.mark.parametrize("name", ["h100", "H100", "h100_datasheet", "my-h100", "NVIDIA H100 80GB"])
def test_a_profile_called_after_a_machine_takes_its_rows(rows, name):
    assert {row.machine for row in rows_of(rows, called(CPU, name), [])} == {"H100"}


def test_a_profile_of_any_name_takes_the_rows_of_the_machine_whose_datasheet_it_has(rows):
    assert {row.machine for row in rows_of(rows, called(H100, "mine"), [])} == {"H100"}


def test_a_profile_that_is_of_none_needs_to_be_told_the_machine(rows):
    with pytest.raises(CalibrationError, match=r"H100, RTX3090, and .* 'mine'; .*machine=H100"):
        rows_of(rows, called(CPU, "mine"), [])
    with pytest.raises(CalibrationError, match="say which"):
        rows_of(rows, called(CPU, "h1000"), [])
    assert len(rows_of(rows, called(CPU, "mine"), ["machine=rtx3090"])) == 1


def test_rows_of_our_policies_are_of_the_profile_that_is_called_so(rows):
    """A GPU that the seed system does not know; two policies at the same caps are not guessed."""
    ours = [
        rows[2].model_copy(update={"line": line, "machine": "RTX 4090", "policy": policy})
        for line, policy in ((7, "optimal"), (8, "streaming"))
    ]
    mixed = [*rows, *ours]
    assert rows_of(mixed, load_machine("rtx4090"), []) == ours
    assert rows_of(mixed, load_machine("rtx4090"), ["policy=streaming"]) == ours[1:]
    assert set(profiles_of(["H100", "RTX 4090"], [load_machine("rtx4090")])) == {"RTX 4090"}
    assert len(candidate_rows(ours)) == 2


def test_conditions_narrow_the_rows(rows):
    found = rows_of(rows, H100, ["model=8b", "seq_len=512"])
    assert [row.line for row in found] == [3, 4]
    with pytest.raises(CalibrationError, match="no row of the table has model=70B"):
        rows_of(rows, H100, ["model=70B"])


@pytest.mark.parametrize("condition", ["colour=red", "model", "model=", "seq_len=long"])
def test_a_condition_that_cannot_be_read_is_named(rows, condition):
    with pytest.raises(CalibrationError, match=condition):
        rows_of(rows, H100, [condition])


def test_a_list_of_cells_chooses_rows_in_its_order(rows, tmp_path):
    cells = tmp_path / "cells.csv"
    cells.write_text("model,seq_len,host_mem_gib,dev_mem_gib,note\n8B,512,75,78,a\n1B,512,16,16,\n")
    assert [row.line for row in listed_rows(rows, cells)] == [4, 2]


def test_without_a_list_the_successful_rows_are_candidates(rows):
    assert sorted(row.line for row in candidate_rows(rows[:4])) == [2, 3, 4]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seq_len,host_mem_gib\n512,75\n", "has no column dev_mem_gib"),
        ("seq_len,host_mem_gib,dev_mem_gib\n512,75,79\n", "line 2: no successful row .*dev_mem_g"),
        ("seq_len,host_mem_gib,dev_mem_gib\n1024,60,24\n", "no successful row .*line 5 failed"),
        ("seq_len,host_mem_gib,dev_mem_gib\n512,75,x\n", "line 2: dev_mem_gib needs a number"),
        ("seq_len,host_mem_gib,dev_mem_gib\nnan,75,78\n", "line 2: no successful row"),
        ("# mine\n\nseq_len,host_mem_gib,dev_mem_gib\n512,75\n", "line 4 has no dev_mem_gib"),
    ],
)
def test_a_wrong_list_of_cells_is_one_clear_error(rows, tmp_path, text, message):
    cells = tmp_path / "cells.csv"
    cells.write_text(text)
    with pytest.raises((CalibrationError, MeasuredTableError), match=message):
        listed_rows(rows, cells)


def test_a_cell_that_several_models_or_machines_have_is_not_guessed(rows, tmp_path):
    cells = tmp_path / "cells.csv"
    cells.write_text("seq_len,host_mem_gib,dev_mem_gib\n512,75,78\n")
    other = rows[2].model_copy(update={"line": 7, "model": "1B"})
    with pytest.raises(CalibrationError, match=r"line 2: rows of H100 1B, H100 8B have seq_len"):
        listed_rows([*rows, other], cells)
    ours = rows[2].model_copy(update={"line": 7, "policy": "streaming"})
    with pytest.raises(CalibrationError, match=r"H100 8B, H100 8B streaming .* or policy"):
        listed_rows([rows[2], ours], cells)


def test_the_rule_chooses_only_what_can_be_predicted(rows):
    """A model that nobody knows, and caps at which the seed system would not have run."""
    unknown = rows[2].model_copy(update={"line": 7, "model": "405B", "dev_mem_gib": 80.0})
    refused = rows[2].model_copy(update={"line": 8, "dev_mem_gib": 8.0})
    chosen = candidate_rows([*rows[:3], unknown, refused])
    assert sorted(row.line for row in chosen) == [2, 3, 4]
    with pytest.raises(CalibrationError, match="unknown model '405b'"):
        candidate_rows([unknown])
