"""A kind of rows is one class: here memory as published, which nothing in the package knows."""

import os
from dataclasses import dataclass

import pytest
from rich.console import Group

from twinstream.fidelity.measured import Predicted, Predictors
from twinstream.fidelity.scoring import Key, Report, errors_of, grouped, score, table_of
from twinstream.hardware_profiles.errors import CalibrationError
from twinstream.schedule.errors import ArgumentError, TwinstreamError

GIB = 2**30


@dataclass(frozen=True)
class MemoryRow:
    """Peak memory of a model whose bytes a parameter are the profile; at most 80 GiB."""

    model: str
    parameters: int
    measured: float | None
    effort: float = 1.0

    @property
    def identity(self):
        return self.model

    def value_in(self, predicted):
        return predicted.memory_bytes

    def ready(self, profile):
        if self.parameters * profile > 80 * GIB:
            raise ArgumentError("over 80 GiB")
        return self

    def refusal(self, error: TwinstreamError) -> str | None:
        return str(error) if "GiB" in str(error) else None

    def predicted(self, profile):
        if profile < 0:
            raise ArgumentError("no bytes a parameter")
        return Predicted(memory_bytes=self.parameters * profile)

    def step_s(self, profile):
        raise NotImplementedError


class MemoryReport(Report[MemoryRow]):
    def __init__(self, rows):
        self.rows = rows

    def told(self, each):
        return {"model": each.row.model, "error": each.error, "refused": each.predicted.refused}

    def json(self):
        return {"mean_error": errors_of(self.rows).mean_error}

    def screen(self):
        return Group(
            table_of(["model"], ["error"], [(e.row.model, f"{e.error}") for e in self.rows])
        )


ROWS = [
    MemoryRow("one", GIB, 16.0 * GIB),
    MemoryRow("two", 2 * GIB, 40.0 * GIB),
    MemoryRow("unknown", GIB, None),
    MemoryRow("large", 6 * GIB, 70.0 * GIB),
]


def scored(profile=16):
    keys = [Key(row.model, row.model) for row in ROWS]
    return score(ROWS, keys, lambda row: profile, jobs=1)


def test_rows_of_memory_are_predicted_scored_and_told():
    found = scored()
    assert [each.error for each in found] == [0.0, pytest.approx(32 / 40 - 1), None, None]
    errors = errors_of(found)
    assert (errors.count, errors.mean_error) == (2, pytest.approx(0.1))
    assert (errors.bias, errors.worst) == (pytest.approx(-0.1), pytest.approx(-0.2))
    assert list(grouped(found, lambda row: row.model)) == [row.model for row in ROWS]
    report = MemoryReport(found)
    assert report.csv().splitlines() == [
        "model,error,refused", "one,0.0,", f"two,{32 / 40 - 1},", "unknown,,", "large,,over 80 GiB",
    ]  # fmt: skip
    assert report.json() == {"mean_error": pytest.approx(0.1)}


def test_a_fault_of_the_profile_is_no_refusal():
    with pytest.raises(ArgumentError, match="no bytes a parameter"):
        scored(-1)


def test_rows_of_one_key_are_predicted_once():
    begun: list[int] = []
    twice = [ROWS[0], MemoryRow("one again", GIB, 20.0 * GIB)]
    keys = [Key("same", "same")] * 2
    found = score(twice, keys, lambda row: 16, jobs=1, on_start=lambda n: begun.append(n) or list)
    assert begun == [1]
    # 16 GiB predicted of both, 18 measured in the mean
    assert errors_of(found).worst == pytest.approx(16 / 18 - 1)


def ended(row, ready, profile):
    os._exit(1)


def test_a_process_that_ended_is_one_sentence():
    with Predictors(2) as predictors, pytest.raises(CalibrationError, match="short of memory"):
        predictors.ask(ended, [(row, 16) for row in [*ROWS, *ROWS]])
