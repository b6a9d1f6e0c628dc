"""The folder of a campaign: whole after any kill, small, and of one device."""

import gzip
import json
import random

import pytest

from benchmarks.gpu.jobs import store as store_module
from benchmarks.gpu.jobs.results import Outcome
from benchmarks.gpu.jobs.store import CampaignError, Store, only_campaign, read_results
from benchmarks.gpu.tests.stand_ins import WHERE

DONE = Outcome(status="done", attempts=1)


def test_an_outcome_is_on_the_disk_at_once_and_found_again(tmp_path):
    Store(tmp_path, WHERE, "tiny").put("probe", DONE)
    assert Store(tmp_path, WHERE, "tiny").results.outcomes == {"probe": DONE}


@pytest.mark.parametrize("content", ["", "{", '{"size": "tiny"}', "\x00\x01", "[]"])
def test_a_damaged_result_file_is_kept_aside_and_begun_again(tmp_path, content):
    (tmp_path / "results.json").write_text(content, encoding="utf-8")
    store = Store(tmp_path, WHERE, "tiny")
    assert store.results.outcomes == {}
    (warning,) = store.warnings
    assert "results.json.damaged" in warning
    assert (tmp_path / "results.json.damaged").read_text(encoding="utf-8") == content
    store.put("probe", DONE)
    assert Store(tmp_path, WHERE, "tiny").warnings == []


@pytest.mark.parametrize(("device", "size"), [("another", "tiny"), (WHERE.device, "full")])
def test_results_of_another_device_or_size_are_not_mixed(tmp_path, device, size):
    Store(tmp_path, WHERE, "tiny").put("probe", DONE)
    with pytest.raises(CampaignError, match="give another --out"):
        Store(tmp_path, WHERE.model_copy(update={"device": device}), size)


@pytest.mark.parametrize(("device", "size"), [("NVIDIA H100", "tiny"), (WHERE.device, "short")])
def test_what_another_card_found_is_set_aside_and_said(tmp_path, device, size):
    for found, number in ((WHERE, 1), (WHERE.model_copy(update={"device": "third"}), 2)):
        (tmp_path / "results.json").unlink(missing_ok=True)
        earlier = Store(tmp_path, found, "tiny")
        earlier.put("probe", DONE)
        earlier.add_timelines({"a": [number]})
        earlier.profile.write_text("of another card")
        store = Store(tmp_path, WHERE.model_copy(update={"device": device}), size, begins_anew=True)
        (warning,) = store.warnings
        assert f"results of cpu {found.device} tiny, and this is cpu {device} {size}" in warning
        assert f"kept in set-aside-{number}, and all is begun anew" in warning
        assert store.results.outcomes == {} and not store.profile.exists()
        aside = tmp_path / f"set-aside-{number}"
        assert read_results(aside).is_done("probe")
        assert sorted(path.name for path in aside.iterdir()) == [
            "profile.toml", "results.json", "timelines.json.gz",
        ]  # fmt: skip


def test_the_same_card_goes_on_whatever_is_set_aside_else(tmp_path):
    Store(tmp_path, WHERE, "tiny").put("probe", DONE)
    store = Store(tmp_path, WHERE, "tiny", begins_anew=True)
    assert store.results.is_done("probe") and store.warnings == []


def test_forgetting_drops_the_jobs_with_a_text_in_their_name(tmp_path):
    store = Store(tmp_path, WHERE, "tiny")
    for key in ("8b S8192 24 GiB", "8b S1024 9 GiB", "probe"):
        store.put(key, DONE)
    store.forget("8b S8192")
    assert list(store.results.outcomes) == ["8b S1024 9 GiB", "probe"]


def test_timelines_add_up_and_a_damaged_file_costs_only_itself(tmp_path):
    store = Store(tmp_path, WHERE, "tiny")
    store.add_timelines({"a": [1, 2]})
    store.add_timelines({"b": [3]})
    path = tmp_path / "timelines.json.gz"
    assert json.loads(gzip.decompress(path.read_bytes())) == {"a": [1, 2], "b": [3]}
    path.write_bytes(path.read_bytes()[:-6])
    store.add_timelines({"c": [4]})
    assert json.loads(gzip.decompress(path.read_bytes())) == {"c": [4]}
    assert "timelines.json.gz.damaged" in store.warnings[0]


def test_files_stay_small(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "MAX_TIMELINES_BYTES", 1000)
    monkeypatch.setattr(store_module, "MAX_LOG_BYTES", 100)
    store = Store(tmp_path, WHERE, "tiny")
    store.add_timelines({"small": [1]})
    draws = random.Random(0)
    noise = [draws.random() for _ in range(1000)]
    store.add_timelines({"large": noise})
    packed = (tmp_path / "timelines.json.gz").read_bytes()
    assert json.loads(gzip.decompress(packed)) == {"small": [1]}
    assert "timelines of large are left out" in (tmp_path / "log.txt").read_text()
    for _ in range(10):
        store.log("x" * 60)
    assert (tmp_path / "log.txt").stat().st_size < 300


def test_two_campaigns_do_not_share_a_folder(tmp_path):
    with (
        only_campaign(tmp_path / "out"),
        pytest.raises(CampaignError, match="another campaign"),
        only_campaign(tmp_path / "out"),
    ):
        pass
    assert list((tmp_path / "out").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CampaignError, match="cannot write into"), only_campaign(tmp_path / "file"):
        pass


def test_few_files_stay_whatever_was_killed_or_damaged(tmp_path):
    for name in ("table.md.partial", "timelines.json.gz.damaged", "results.json"):
        (tmp_path / name).write_text("half")
    Store(tmp_path, WHERE, "tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["results.json.damaged"]
