"""The table, its page, and where it is published."""

import csv
import json
from pathlib import Path

import pytest

from benchmarks.gpu.jobs.campaign import campaign_of
from benchmarks.gpu.jobs.results import (
    AttentionChecked,
    CellFound,
    CheckFound,
    KindTime,
    Outcome,
    PeerFound,
    Results,
    SuiteFound,
    WholeFound,
)
from benchmarks.gpu.jobs.store import CampaignError, Store
from benchmarks.gpu.report.figures import jobs_csv
from benchmarks.gpu.report.page import markdown_of
from benchmarks.gpu.report.publish import main as publish_main
from benchmarks.gpu.report.publish import publish, write_tables
from benchmarks.gpu.report.summary import summary_of
from benchmarks.gpu.report.table import table_of
from benchmarks.gpu.tests.stand_ins import MACHINE, WHERE
from twinstream.executor.run.device_state import DeviceState
from twinstream.hardware_profiles.loader import load_machine, save_machine
from twinstream.schedule.files import read_document

PAGES = Path(__file__).parents[3] / "docs/benchmarks"
PLAN = campaign_of("full", None)
CELL = CellFound(
    tokens_per_step=524_288, workload="32 rounds of 1 chunk of 16,384 tokens, sequences of 8,192",
    policy="optimal", machine="m 0", predicted_step_s=45.0, predicted_extended_s=45.9,
    bound_step_s=44.0, extended_step_s=46.0, extended_spread_s=0.92, rounds_measured=(2, 4),
    short_steps_s=(3.2, 6.0), model_flops=2 * 10**16, executed_flops=3 * 10**16,
    peak_flop_per_s=1e15, device_cap_bytes=24 * 2**30, device_used_bytes=23 * 2**30,
    host_arena_bytes=80 * 2**30, host_ns_per_op=12_345.0, losses=(11.9, 11.9),
    kinds=(KindTime(name="block_forward", num_ops=128, predicted_ns=2.2e9, measured_ns=2.5e9,
                    floor_ns=2e9),),
    states=(DeviceState(sm_clock_mhz=1500, power_w=690.0, temperature_c=60),
            DeviceState(sm_clock_mhz=1400, power_w=700.0, temperature_c=64,
                        held_back=("power cap",)), None),
)  # fmt: skip
PEER = PeerFound(
    tokens_per_step=524_288, step_s=92.0, micro_batch_s=1.4, update_s=2.4, loss=11.9,
    device_used_bytes=70 * 2**30,
)  # fmt: skip


def results(**outcomes: Outcome) -> Results:
    known = {
        "tests": Outcome(status="done", found=SuiteFound(passed=40, failed=1, skipped=2,
                                                         failures=("test_x - boom",))),
        "8b S8192 24 GiB": Outcome(status="done", found=CELL),
        "8b S8192 130 GiB": Outcome(status="skipped", reason="this device has 79.1 GiB"),
        "15b S8192 78 GiB": Outcome(status="started", attempts=1),
        "fsdp_offload 8b S8192": Outcome(status="done", found=PEER),
    }  # fmt: skip
    return Results(where=WHERE, size="full", outcomes=known | outcomes)


def test_a_cells_figures_follow_from_what_was_measured():
    (row,) = table_of(results(), PLAN).cells
    assert row.measured_tokens_per_s == pytest.approx(524_288 / 46.0)
    assert row.predicted_tokens_per_s == pytest.approx(524_288 / 45.0)
    assert row.error == pytest.approx(45.0 / 46.0 - 1.0)
    assert row.of_bound == pytest.approx(44.0 / 46.0)
    assert row.mfu == pytest.approx(2e16 / 46.0 / 1e15)
    assert row.hfu == pytest.approx(3e16 / 46.0 / 1e15)
    assert row.extension_error == pytest.approx(0.02)
    assert (row.whole_error, row.spread) == (None, pytest.approx(0.02))
    assert (row.device_used_gib, row.device_cap_gib, row.host_arena_gib) == (23.0, 24.0, 80.0)
    assert row.host_us_per_op == pytest.approx(12.345)
    assert row.goal_tokens_per_s == 11_000
    assert row.state == DeviceState(sm_clock_mhz=1450, power_w=695.0, temperature_c=64,
                                    held_back=("power cap",), num_readings=2)  # fmt: skip


def test_a_step_that_was_run_whole_is_what_was_measured():
    whole = Outcome(status="done", found=WholeFound(step_s=45.5, losses=(11.9, 11.9)))
    key = "8b S8192 24 GiB"
    (row,) = table_of(results(**{f"{key} whole": whole}), PLAN).cells
    assert row.measured_tokens_per_s == pytest.approx(524_288 / 45.5)
    assert row.error == pytest.approx(45.0 / 45.5 - 1.0)
    assert (row.whole_error, row.spread) == (pytest.approx(46.0 / 45.5 - 1.0), None)
    noise = CELL.model_copy(update={"extended_step_s": None, "extended_spread_s": None})
    outcomes = {key: Outcome(status="done", found=noise)}
    assert table_of(results(**outcomes), PLAN).cells == ()
    (row,) = table_of(results(**outcomes, **{f"{key} whole": whole}), PLAN).cells
    assert (row.measured_tokens_per_s, row.whole_error) == (524_288 / 45.5, None)


def test_cells_come_last_since_an_answer_is_cut_off_at_its_beginning():
    text = markdown_of(results(), table_of(results(), PLAN))
    heads = [line for line in text.splitlines() if line.startswith("## ")]
    assert heads == ["## Without figures", "## Times by kind", "## Peers", "## Cells"]


def test_a_peer_is_compared_with_the_cell_beside():
    (row,) = table_of(results(), PLAN).peers
    assert row.ours_over_peer == pytest.approx(2.0)
    without = results(**{"8b S8192 24 GiB": Outcome(status="failed", reason="broke")})
    assert table_of(without, PLAN).peers[0].ours_over_peer is None


def test_every_job_without_figures_is_listed_with_the_reason():
    rows = {row.job: (row.status, row.reason) for row in table_of(results(), PLAN).without}
    assert rows["8b S8192 130 GiB"] == ("skipped", "this device has 79.1 GiB")
    assert rows["15b S8192 78 GiB"] == ("cut off", "its call ended before it did (1 start(s))")
    assert rows["probe"] == ("waiting", "for time, or for what comes before it")
    assert len(rows) == len(PLAN.in_order()) + 6 - 3, "6 jobs come before and after"


def test_the_page_says_what_reached_its_goal():
    text = markdown_of(results(), table_of(results(), PLAN))
    assert "| 11,000 ✓ |" in text and "| 95.7% ✓ |" in text
    assert "| 23.00 / 24.00 |" in text and "| 11,398 ± 2.0% |" in text
    assert "| block_forward | 128 | 2,000.0 | 2,200.0 | 2,500.0 | 1.25 |" in text
    assert "40 passed, 1 failed, 2 skipped" in text and "- test_x - boom" in text
    assert "| 1450 MHz, 695 W, 64 C, power cap |" in text
    slow = CELL.model_copy(update={"extended_step_s": 50.0})
    missed = results(**{"8b S8192 24 GiB": Outcome(status="done", found=slow)})
    text = markdown_of(missed, table_of(missed, PLAN))
    assert "| 11,000 |" in text and "| 88.0% |" in text
    fast = CELL.model_copy(update={"extended_step_s": 40.0})
    beaten = results(**{"8b S8192 24 GiB": Outcome(status="done", found=fast)})
    assert "| 110.0% (profile too slow) |" in markdown_of(beaten, table_of(beaten, PLAN))
    near = CELL.model_copy(update={"extended_step_s": 44.0 / 1.0003})
    reached = results(**{"8b S8192 24 GiB": Outcome(status="done", found=near)})
    assert "| 100.0% ✓ |" in markdown_of(reached, table_of(reached, PLAN))


def test_a_page_of_nothing_is_a_page():
    nothing = Results(where=WHERE, size="full")
    text = markdown_of(nothing, table_of(nothing, PLAN))
    assert "No cell has been measured." in text


def test_a_campaign_is_published_under_its_devices_name(tmp_path):
    campaign, pages = tmp_path / "campaign", tmp_path / "pages"
    campaign.mkdir()
    pages.mkdir()
    where = WHERE.model_copy(update={"device": "NVIDIA H100 80GB HBM3"})
    store = Store(campaign, where, "full")
    store.put("8b S8192 24 GiB", Outcome(status="done", found=CELL))
    save_machine(MACHINE, store.profile)
    write_tables(store.results, campaign)
    written = publish(campaign, pages)
    assert [path.name for path in written] == [
        f"nvidia-h100-80gb-hbm3{ending}"
        for ending in (".md", "-cells.csv", "-jobs.csv", ".json", ".toml")
    ]
    page, cells, _, kept, profile = written
    assert "# Campaign on NVIDIA H100 80GB HBM3" in page.read_text()
    assert all(f"({path.name})" in page.read_text() for path in written[1:]), "links"
    assert "timelines" not in page.read_text(), "there are none"
    (row,) = csv.DictReader(cells.read_text().splitlines())
    assert float(row["measured_tokens_per_s"]) == pytest.approx(524_288 / 46.0, rel=1e-5)
    assert (row["goal_tokens_per_s"], row["whole_error"]) == ("11000", "")
    assert read_document(Results, kept) == store.results
    assert load_machine(profile) == MACHINE
    with pytest.raises(CampaignError, match="is no folder"):
        publish(campaign, tmp_path / "nowhere")


def test_the_tables_have_every_figure_of_a_job():
    found = results()
    rows = [*csv.reader(jobs_csv(found, table_of(found, PLAN)).splitlines())]
    assert len(rows) == len({tuple(row) for row in rows}), "no figure twice"
    told = {tuple(row[:3]): row[3] for row in rows}
    kind = "kinds/block_forward"
    assert told["8b S8192 24 GiB", kind, "num_ops"] == "128"
    assert told["8b S8192 24 GiB", kind, "measured_ns"] == "2.5e+09"
    assert told["tests", "", "failed"] == "1" and told["tests", "", "failures"] == "test_x - boom"
    peer = "fsdp_offload 8b S8192"
    assert float(told[peer, "", "tokens_per_s"]) == pytest.approx(524_288 / 92.0, rel=1e-5)
    assert (told[peer, "", "beside"], told[peer, "", "ours_over_peer"]) == ("8b S8192 24 GiB", "2")
    assert told["8b S8192 130 GiB", "", "reason"] == "this device has 79.1 GiB"
    assert told["probe", "", "status"] == "waiting"


def test_half_a_page_says_what_ran_and_what_did_not():
    text = summary_of(results(), table_of(results(), PLAN), {"x-cells.csv": "a row a cell"})
    assert "Ran: 3 jobs in 0 s (cells 1, whole steps 0, peers 1)." in text
    assert "2.2% off on average, -2.2% at worst (8b S8192 24 GiB)" in text, "45 / 46 - 1"
    assert "Tests marked gpu: 40 passed, 1 failed, 2 skipped." in text
    assert "Failed: test_x - boom" in text
    assert "skipped (this device has 79.1 GiB): 8b S8192 130 GiB." in text
    assert "waiting (for time, or for what comes before it): facts, smoke, kernels" in text
    assert "[x-cells.csv](x-cells.csv)" in text
    assert len(text.split()) < 350
    tried = AttentionChecked(name="a", seq_len=8, num_sequences=1, head_dim=4)
    attention = (tried.model_copy(update={"same_bits": True}),
                 tried.model_copy(update={"same_bits": False}), tried)  # fmt: skip
    found = CheckFound(attention=attention, unsteady="copies H2D are 37% off any line")
    with_check = results(check=Outcome(status="done", found=found))
    text = summary_of(with_check, table_of(with_check, PLAN), {})
    assert "- Check: attention ran 2 of 3 times, 1 with the same bits twice." in text
    assert "- Links have no figures: copies H2D are 37% off any line" in text
    empty = Results(where=WHERE, size="full")
    assert "Ran: 0 jobs" in summary_of(empty, table_of(empty, PLAN), {})


@pytest.mark.parametrize(
    ("cell", "measured", "peer", "ratio", "kind_ms"),
    [
        ("8b S8192 78 GiB", 10_115, "compiled 8b S8192", 1.18, 2213.1),
        ("8b S1024 78 GiB", 13_238, "compiled 8b S1024", 1.33, 1549.5),
        ("8b S8192 24 GiB", 9_354, "fsdp_offload 8b S8192", 9.19, 4452.1),
    ],
)
def test_what_the_h200_measured_is_in_its_tables(cell, measured, peer, ratio, kind_ms):
    """Figures as they were printed on the machine (2026-11-27)."""
    with (PAGES / "nvidia-h200-cells.csv").open() as file:
        cells = {row["cell"]: row for row in csv.DictReader(file)}
    with (PAGES / "nvidia-h200-jobs.csv").open() as file:
        jobs = {(row["job"], row["part"], row["figure"]): row["value"]
                for row in csv.DictReader(file)}  # fmt: skip
    assert len(cells) == 17
    assert float(cells[cell]["measured_tokens_per_s"]) == pytest.approx(measured, abs=0.6)
    assert float(jobs[peer, "", "ours_over_peer"]) == pytest.approx(ratio, abs=0.006)
    backward = float(jobs[cell, "kinds/block_backward", "measured_ns"])
    assert backward / 1e6 == pytest.approx(kind_ms, abs=0.06)
    assert sum(key[2] == "ratio" for key in jobs) == 152, "samples of the probe"


def test_the_h200s_page_and_tables_are_what_publish_writes(tmp_path):
    campaign, pages = tmp_path / "campaign", tmp_path / "pages"
    campaign.mkdir()
    pages.mkdir()
    for name, ending in (("results.json", ".json"), ("profile.toml", ".toml"),
                         ("timelines.json.gz", "-timelines.json.gz")):  # fmt: skip
        (campaign / name).write_bytes((PAGES / f"nvidia-h200{ending}").read_bytes())
    for path in publish(campaign, pages):
        assert path.read_bytes() == (PAGES / path.name).read_bytes(), path.name


def test_publishing_what_is_not_there_is_a_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        publish_main([str(tmp_path), str(tmp_path)])
    assert caught.value.code == 2
    assert "error: cannot read" in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_the_tables_of_a_tiny_campaign_know_its_cells(backend, tmp_path):
    (cell, *_) = campaign_of("tiny", backend=backend).cells
    where = WHERE.model_copy(update={"backend": backend})
    outcomes = {cell.key: Outcome(status="done", found=CELL)}
    write_tables(Results(where=where, size="tiny", outcomes=outcomes), tmp_path)
    (row,) = json.loads((tmp_path / "table.json").read_text())["cells"]
    assert row["cell"] == cell.key
