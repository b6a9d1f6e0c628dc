"""The first cells of the quality matrix; the whole of it is `python -m benchmarks.quality.matrix`.

pytest tests/bench/test_bench_matrix.py -m bench -s
"""

import csv
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.quality.matrix import Effort, fill_others, main, missing_cells, read_rows, run
from benchmarks.quality.matrix_cells import (
    DEVICE_GIB,
    GIB,
    HOST_GIB,
    MACHINES,
    MODELS,
    SEQ_LENS,
    Cell,
    a_third,
    cells,
    state_gib,
)
from benchmarks.quality.matrix_plot import plot
from benchmarks.quality.matrix_row import KEY_COLUMNS, Row, columns, measure, other_policies
from benchmarks.quality.matrix_summary import (
    against,
    below_bound,
    faster_than_optimal,
    on_same_chain,
    quantile,
    summary,
)
from twinstream.hardware_profiles.loader import load_machine

SAMPLE = 4  # cells of the shorter sequences, of the smaller models


@pytest.mark.bench
def test_bench_matrix_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "matrix.csv"
    cheap = [cell for cell in cells() if cell.seq_len <= 8192 and cell.model in ("1b", "8b")]
    run(path, cheap[:SAMPLE], Effort(jobs=2))
    rows = read_rows(path)
    with capsys.disabled():
        print("\n" + summary(rows))
    assert missing_cells(path, cheap[: SAMPLE + 1]) == [cheap[SAMPLE]]
    assert Counter(row["status"] for row in rows) == {"ok": SAMPLE}
    assert faster_than_optimal(rows, on_same_chain()) == []
    assert below_bound(rows) == []
    for row in rows:
        assert float(row["step_s"]) >= float(row["bound_s"]) >= float(row["family_bound_s"]) > 0
        assert float(row["extent_issue"]) >= 1
        assert float(row["extent_gib"]) <= float(row["device_gib"])
    ElementTree.fromstring(plot(rows))


@pytest.mark.bench
def test_the_matrix_covers_every_axis_and_so_does_any_prefix() -> None:
    found = cells()
    assert len(found) == len(set(found)) >= 240
    for sample in (found, found[:40]):
        for axis, values in (("machine", MACHINES), ("model", MODELS), ("seq_len", SEQ_LENS)):
            counts = Counter(getattr(cell, axis) for cell in sample)
            assert set(counts) == set(values)
    assert {cell.device_gib for cell in found} >= set(DEVICE_GIB)
    assert {cell.host_gib for cell in found} == set(HOST_GIB)


@pytest.mark.bench
def test_cells_keep_to_their_machine_and_to_whole_sequences() -> None:
    for cell in cells():
        memory_bytes = load_machine(cell.machine).number("device_memory_bytes")
        assert cell.device_gib * GIB <= memory_bytes
        assert cell.tokens_per_step % cell.seq_len == 0
        assert cell.tokens_per_step == max(262_144, cell.seq_len)
        # the state alone needs both memories together, but for what is used once
        assert cell.device_gib + cell.host_gib > 0.9 * state_gib(cell.model)


@pytest.mark.bench
def test_a_cell_that_takes_too_long_has_a_row_that_says_so() -> None:
    slow = Cell("h100", "8b", 8192, 24, 256)
    row = measure(slow, "none", others=True, limit_s=1)
    assert (row["status"], row["message"]) == ("timeout", "cut off after 1 s")
    assert tuple(row[name] for name in KEY_COLUMNS) == slow.key


@pytest.mark.bench
def test_the_budget_begins_no_cell_once_it_is_spent(tmp_path: Path) -> None:
    path = tmp_path / "matrix.csv"
    run(path, cells()[:2], Effort(jobs=1, budget_s=0.0))
    assert read_rows(path) == []


@pytest.mark.bench
def test_comparing_later_says_the_same_as_at_once(tmp_path: Path) -> None:
    cell = Cell("rtx3090", "1b", 2048, 24, 32)
    at_once = measure(cell, "none", others=True)
    assert at_once["others_commit"] == "none" and float(at_once["streaming"]) > 0
    others = dict.fromkeys(("others_commit", *other_policies()), "")
    path = tmp_path / "matrix.csv"
    assert missing_cells(path, [cell]) == [cell]
    with path.open("a", newline="", encoding="utf-8") as file:
        csv.DictWriter(file, columns(), lineterminator="\n").writerow(at_once | others)
    fill_others(path, Effort(jobs=1, budget_s=0.0))
    assert read_rows(path) == [at_once | others]
    fill_others(path, Effort(jobs=1))
    (filled,) = read_rows(path)
    assert filled | {"others_commit": "none"} == at_once


def test_quantiles_are_values_that_enough_others_do_not_exceed() -> None:
    values = [float(i) for i in range(1, 21)]
    assert quantile(values, 0.95) == 19.0
    assert quantile(values, 1.0) == 20.0
    assert quantile([3.0], 0.5) == 3.0


def test_only_a_policy_that_fits_and_takes_less_is_faster() -> None:
    row: Row = {"status": "ok", "step_s": "2.0", "streaming": "1.9", "resident": "2.0", "none": ""}
    failed = {**row, "status": "infeasible", "step_s": ""}
    assert faster_than_optimal([row, failed], ("streaming", "resident", "none")) == [
        (row, "streaming")
    ]


def test_only_step_times_below_the_bound_of_their_own_chain_are_told() -> None:
    row: Row = {"status": "ok", "bound_s": "2.0", "step_s": "2.0"}
    row |= dict.fromkeys(other_policies(), "") | {"streaming": "1.9", "layer_offload": "1.0"}
    assert below_bound([row, {**row, "status": "infeasible"}]) == [(row, "streaming")]


def test_a_file_is_compared_with_an_older_one_by_the_cells_that_both_have_planned() -> None:
    key = dict(zip(KEY_COLUMNS, Cell("h100", "8b", 2048, 24, 128).key, strict=True))
    old = key | {"status": "ok", "step_s": "2.0", "gap_family": "0.01", "plan_seconds": "9.0"}
    old |= {"rounds_per_step": "2", "chunks_per_round": "1", "chunk_tokens": "2048"}
    new = old | {"step_s": "2.1", "gap_family": "0.06", "plan_seconds": "3.0"}
    lost, other = {**new, "seq_len": "512", "status": "infeasible"}, {**new, "seq_len": "8192"}
    told = against([new, lost, other], [old, {**old, "seq_len": "512"}])
    assert "1 cells" in told and "median +5.00%" in told
    assert "no longer planned: h100 8b 512 24 + 128 GiB" in told
    assert "less time in 1 of 1" in told
    assert "- h100 8b 2,048 24 + 128 GiB: 2.100 s, +5.00%" in told


def test_a_third_is_the_same_83_cells_of_the_matrix() -> None:
    some = a_third()
    assert len(some) == len(set(some)) == 83
    assert some == a_third() == [cell for cell in cells() if cell in set(some)]


def test_a_cell_is_named_in_the_file_by_its_axes() -> None:
    assert Cell("h100", "8b", 2048, 24, 128).key == ("h100", "8b", "2048", "24", "128")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--summary", "nowhere.csv"], "cannot read or write the file: .*nowhere.csv"),
        (["--out", __file__], "has other columns than this version writes"),
        (["--out", "nowhere/rows.csv"], "cannot read or write the file: .*nowhere"),
        (["--out", "rows.csv", "--only", "gpu"], "no such axis: gpu"),
        (["--out", "rows.csv", "--jobs", "0"], "2"),
    ],
)
def test_a_wrong_file_or_flag_ends_in_a_sentence(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=message):
        main(arguments)
