"""The jobs of a campaign: in order, within the time, never twice, whatever breaks."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu.cells.fitting import fitting_cell
from benchmarks.gpu.cells.plans import Refused
from benchmarks.gpu.device import requests
from benchmarks.gpu.jobs.campaign import campaign_of
from benchmarks.gpu.jobs.results import (
    CellFound,
    FactsFound,
    KernelsFound,
    Outcome,
    PeerFound,
    ProbeFound,
    Results,
    SuiteFound,
    WholeFound,
)
from benchmarks.gpu.jobs.store import Store
from benchmarks.gpu.run import engine as engine_module
from benchmarks.gpu.run import gpu_tests
from benchmarks.gpu.run.gpu_tests import SuiteRun
from benchmarks.gpu.tests.stand_ins import MACHINE, WHERE, Clock, FakeDevice, engine
from twinstream.executor.probe.process import JobFailed, JobRefused, JobTimeout
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.schema import Number
from twinstream.models.recipes.recipe import KernelChoice
from twinstream.schedule.files import read_document

KEYS = ["kernels", "probe", "tiny S64 offloading", "tiny S64 resident", "tiny S64 1 MiB",
        "tiny S64 offloading whole", "tiny S64 resident sdpa_cpu",
        "plain tiny S64", "compiled tiny S64", "fsdp_offload tiny S64"]  # fmt: skip


class Killed(BaseException):
    """What a call sees when it is killed."""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path, WHERE, "tiny")


def again(store: Store) -> Store:
    """The store as a second call finds it."""
    return Store(store.folder, WHERE, "tiny")


def statuses(store: Store) -> dict[str, str]:
    return {key: outcome.status for key, outcome in store.results.outcomes.items()}


def test_every_job_is_done_in_order_and_written(store):
    device = FakeDevice(Clock())
    engine(store, device).run()
    assert list(statuses(store)) == KEYS
    assert set(statuses(store).values()) == {"done", "skipped"}
    assert read_document(Results, store.folder / "results.json") == store.results
    assert isinstance(store.results.outcomes["probe"].found, ProbeFound)
    assert device.names() == ["ProbeDevice", *["RunSchedules"] * 4, *["RunPeer"] * 3]


def test_a_cell_is_extended_from_its_short_passes(store):
    engine(store, FakeDevice(Clock()), stages=("probe", "cells")).run()
    cell = store.results.outcomes["tiny S64 offloading"].found
    assert isinstance(cell, CellFound)
    assert cell.rounds_measured == (2, 4)
    assert cell.short_steps_s == pytest.approx((0.012, 0.014))
    assert cell.extended_step_s == pytest.approx(0.016)  # 6 rounds of 1 ms beside 10 ms
    assert cell.extended_spread_s is None  # of one pass
    whole = store.results.outcomes["tiny S64 offloading whole"].found
    assert isinstance(whole, WholeFound) and whole.step_s == pytest.approx(0.016)
    assert cell.device_used_bytes == 2**30
    assert cell.host_ns_per_op == 2500.0


def test_more_rounds_that_took_no_longer_are_noise_and_no_rate(store, monkeypatch):
    from benchmarks.gpu.tests import stand_ins

    right = stand_ins._run_of

    def shrinking(schedule):
        run = right(schedule)
        step_ns = 2e7 - run.timeline.step_ns
        timeline = run.timeline.model_copy(update={"step_ns": step_ns, "spread_ns": 1e5})
        return replace(run, timeline=timeline)

    monkeypatch.setattr(stand_ins, "_run_of", shrinking)
    engine(store, FakeDevice(Clock()), stages=("probe", "cells")).run()
    refused = store.results.outcomes["tiny S64 resident"]
    assert refused.status == "failed"
    assert "4 rounds took 0.006 s and 2 took 0.008 s" in refused.reason
    told = store.results.outcomes["tiny S64 offloading"].found  # is run whole, too
    assert isinstance(told, CellFound) and told.extended_step_s is None
    assert told.extended_spread_s == pytest.approx(1e-4 * 5**0.5)
    assert read_document(Results, store.folder / "results.json") == store.results


def test_a_peer_is_its_micro_batches_and_one_update(store):
    engine(store, FakeDevice(Clock()), stages=("peers",)).run()
    peer = store.results.outcomes["plain tiny S64"].found
    assert isinstance(peer, PeerFound)
    assert peer.step_s == pytest.approx(768 / 128 * 0.5 + 0.25)


def test_a_cell_that_cannot_be_planned_is_skipped_with_what_would_do(store):
    engine(store, FakeDevice(Clock()), stages=("probe", "cells")).run()
    assert "Tried, and fits: --device-mem" in store.results.outcomes["tiny S64 1 MiB"].reason


def test_a_second_call_does_only_what_is_left(store):
    clock = Clock()
    first = engine(store, FakeDevice(clock, seconds=6.0), total_s=30.0)
    first.run()
    assert {"probe", "tiny S64 offloading"} <= set(statuses(store))
    assert first.waiting
    device = FakeDevice(Clock())
    second = engine(again(store), device)
    second.run()
    assert second.waiting == []
    assert list(second.store.results.outcomes) == KEYS
    assert "ProbeDevice" not in device.names()
    runs = [r for r in (*device.asked,) if isinstance(r, requests.RunSchedules)]
    ran = (KEYS[2], KEYS[3], KEYS[5], KEYS[6])
    assert len(runs) == 4 - sum(key in statuses(store) for key in ran)


def test_no_job_is_begun_that_would_not_end_in_time(store):
    device = FakeDevice(Clock())
    late = engine(store, device, total_s=4.0)
    late.run()
    assert device.asked == []
    assert (
        "kernels" in late.waiting and "probe" in late.waiting and "plain tiny S64" in late.waiting
    )
    assert statuses(store) == {}


def test_a_killed_call_loses_only_the_job_in_flight(store):
    device = FakeDevice(Clock(), instead={requests.RunPeer: Killed})
    with pytest.raises(Killed):
        engine(store, device).run()
    found = again(store)
    assert found.results.outcomes["tiny S64 resident"].status == "done"
    assert found.results.outcomes["plain tiny S64"].status == "started"
    engine(found, FakeDevice(Clock())).run()
    assert found.results.outcomes["plain tiny S64"].status == "done"
    assert found.results.attempts("plain tiny S64") == 2


def test_a_job_that_killed_two_calls_is_left_alone(store):
    for _ in range(2):
        with pytest.raises(Killed):
            device = FakeDevice(Clock(), instead={requests.RunPeer: Killed})
            engine(again(store), device, stages=("peers",), plan=one_peer()).run()
    device = FakeDevice(Clock())
    engine(again(store), device, stages=("peers",), plan=one_peer()).run()
    assert device.asked == []


def one_peer():
    whole = campaign_of("tiny", None)
    return replace(whole, peers=whole.peers[:1])


@pytest.mark.parametrize(
    ("error", "logged"), [(JobFailed("it broke", "trace"), "trace"), (JobRefused("no"), "no")]
)
def test_a_job_that_breaks_is_noted_and_the_others_go_on(store, error, logged):
    device = FakeDevice(Clock(), instead={requests.RunSchedules: lambda: error})
    engine(store, device).run()
    outcome = store.results.outcomes["tiny S64 offloading"]
    assert (outcome.status, outcome.reason) == ("failed", str(error))
    assert statuses(store)["plain tiny S64"] == "done"
    assert logged in (store.folder / "log.txt").read_text()
    engine(again(store), FakeDevice(Clock())).run()
    assert again(store).results.outcomes["tiny S64 offloading"].status == "done"


def test_a_refused_peer_is_skipped_for_good(store):
    device = FakeDevice(Clock(), instead={requests.RunPeer: lambda: JobRefused("no room")})
    engine(store, device, stages=("peers",)).run()
    outcome = store.results.outcomes["plain tiny S64"]
    assert (outcome.status, outcome.reason) == ("skipped", "no room")


def test_a_job_cut_off_by_the_end_of_the_call_may_be_tried_again_and_again(store):
    for _ in range(3):
        device = FakeDevice(
            Clock(), instead={requests.RunPeer: lambda: JobTimeout("not done after 15 s")}
        )
        engine(again(store), device, total_s=15.0, stages=("peers",), plan=one_peer()).run()
        assert device.limits_s == [15.0]
    outcome = again(store).results.outcomes["plain tiny S64"]
    assert (outcome.status, outcome.attempts) == ("failed", 0)


def test_a_job_beyond_its_own_limit_counts(store):
    device = FakeDevice(Clock(), instead={requests.RunPeer: lambda: JobTimeout("too long")})
    engine(store, device, stages=("peers",), plan=one_peer()).run()
    assert store.results.outcomes["plain tiny S64"].attempts == 1


def test_cells_over_the_devices_memory_are_skipped_with_the_reason(store):
    small = MACHINE.model_copy(
        update={
            "device_memory_bytes": Number(value=5 * 2**20, kind="measured", source="test"),
        }
    )
    engine(store, FakeDevice(Clock(), machine=small), stages=("probe", "cells")).run()
    outcome = store.results.outcomes["tiny S64 offloading"]
    assert (outcome.status, outcome.reason) == ("skipped", "this device has 5.00 MiB")


def test_cells_wait_where_there_is_no_profile(store):
    waiting = engine(store, FakeDevice(Clock()), stages=("cells",))
    waiting.run()
    assert waiting.waiting == KEYS[2:7]
    assert statuses(store) == {}


def test_a_profile_that_is_not_the_probed_one_is_probed_again(store):
    engine(store, FakeDevice(Clock()), stages=("probe",)).run()
    store.profile.write_text('name = "other"\n', encoding="utf-8")
    device = FakeDevice(Clock())
    engine(again(store), device, stages=("probe",)).run()
    assert device.names() == ["ProbeDevice"]


def test_a_run_whose_loss_is_no_number_does_not_count(store, monkeypatch):
    from benchmarks.gpu.tests import stand_ins

    right = stand_ins._run_of
    monkeypatch.setattr(
        stand_ins, "_run_of", lambda schedule: replace(right(schedule), losses=(float("nan"),))
    )
    engine(store, FakeDevice(Clock()), stages=("probe", "cells")).run()
    outcome = store.results.outcomes["tiny S64 offloading"]
    assert outcome.status == "failed" and "nan" in outcome.reason


class Plans:
    """Of cells: never ready where `stuck`, and waiting for them moves the clock."""

    def __init__(self, clock: Clock, stuck: set[str]) -> None:
        self.clock, self.stuck = clock, stuck

    def is_ready(self, key: str) -> bool:
        self.clock.now_s += 1.0
        return key not in self.stuck

    def get(self, key: str) -> Refused:
        return Refused("planning broke: AssertionError: seven", broke=True)


def test_a_plan_that_broke_or_never_comes_costs_only_its_cell(store, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(engine_module.time, "sleep", lambda seconds: None)
    plan = campaign_of("tiny", None)
    first, second, _, third = plan.cells
    made = engine(store, FakeDevice(clock))
    jobs = [first, second, plan.peers[0], third]
    made._run_as_planned(jobs, Plans(clock, {first.key, third.key}), MACHINE)
    found = store.results.outcomes
    assert list(found) == [second.key, first.key, "plain tiny S64", third.key]
    assert (found[second.key].status, found[second.key].attempts) == ("failed", 1)
    assert "AssertionError: seven" in found[second.key].reason
    assert found[first.key].reason == "no plan after 120 s of waiting for it"
    assert made.waiting == []


def test_early_peers_come_after_the_most_telling_cells_and_their_whole_steps(store):
    plain, *others = campaign_of("tiny", None).peers
    plan = replace(campaign_of("tiny", None), peers=(*others, replace(plain, early=True)))
    device, beside = FakeDevice(Clock()), FakeDevice(Clock())
    made = engine(store, device, plan=plan)
    made.peer_worker = beside
    made.run()
    order = [key for key in store.results.outcomes if key not in ("kernels", "probe")]
    assert order == [*KEYS[2:6], plain.key, KEYS[6], *(peer.key for peer in others)]
    assert device.names() == ["ProbeDevice", *["RunSchedules"] * 4]
    assert beside.names() == ["RunPeer"] * 3


def test_the_campaign_of_a_lent_gpu_is_in_order_of_value():
    order = [job.key for job in campaign_of("full", None).in_order()]
    assert order[:10] == [
        "8b S8192 78 GiB",
        "8b S8192 24 GiB",
        "8b S1024 9 GiB",
        "8b S8192 78 GiB whole",
        "compiled 8b S8192",
        "8b S8192 24 GiB whole",
        "8b S1024 9 GiB whole",
        "8b S8192 78 GiB sdpa_cudnn",
        "8b S8192 24 GiB sdpa_cudnn",
        "8b S8192 resident",
    ]
    assert len(set(order)) == len(order)


GIB = 2**30


@pytest.mark.parametrize(
    ("device_gib", "planned_gib"),
    [(79.2, 78.0), (78.4, 77.9), (77.5, 77.0), (139.8, 78.0)],
)
def test_a_cell_is_not_skipped_for_some_mib_and_leaves_half_a_gib_of_the_device(
    device_gib, planned_gib
):
    cell = campaign_of("full", None).cells[0]
    machine = MACHINE.model_copy(
        update={
            "device_memory_bytes": Number(value=device_gib * GIB, kind="measured", source="test")
        }
    )
    found = fitting_cell(cell, machine)
    assert not isinstance(found, str)
    assert found.key == cell.key
    assert found.device_bytes == pytest.approx(planned_gib * GIB, abs=1.0)
    too_large = replace(cell, device_bytes=130 * GIB)
    if device_gib < 100:
        assert fitting_cell(too_large, machine) == f"this device has {device_gib:.2f} GiB"


def test_cells_of_another_attention_are_planned_with_it_where_it_is_known_to_be_right(store):
    device = FakeDevice(Clock())
    engine(store, device, stages=("probe", "cells")).run()
    assert statuses(store)["tiny S64 resident sdpa_cpu"] == "done"
    (probe,) = [r for r in device.asked if isinstance(r, requests.ProbeDevice)]
    assert (probe.chosen.kernels, probe.chosen.others) == (KernelChoice(), ("sdpa_cpu",))
    found = KernelsFound(kernels=KernelChoice(), others=())
    store.put("kernels", Outcome(status="done", attempts=1, found=found))
    store.forget("sdpa_cpu")
    engine(store, FakeDevice(Clock()), stages=("cells",)).run()
    outcome = again(store).results.outcomes["tiny S64 resident sdpa_cpu"]
    assert outcome.status == "skipped"
    assert outcome.reason == "attention sdpa_cpu is not known to be right here (see kernels)"


def test_facts_come_first_and_are_told(store):
    device = FakeDevice(Clock())
    made = engine(store, device, stages=("facts", "peers"))
    made.run()
    assert device.names()[0] == "NoteFacts"
    assert store.results.outcomes["facts"].found == FactsFound(facts={"machine": "a stand-in"})
    assert "machine: a stand-in" in made.__dict__["told"]


def suite(*outcomes: str, **more: object) -> SuiteRun:
    return SuiteRun(SuiteFound(passed=len(outcomes), reached=outcomes, **more), "")


def test_tests_come_last_and_are_done_only_when_all_were_reached(store, monkeypatch):
    asked: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    answers = iter([suite("a"), suite("a", "b", complete=False), suite("a", "b", "c")])

    def run(paths, before, limit_s, printed):
        printed.touch()
        asked.append((tuple(paths), before.reached))
        return next(answers)

    monkeypatch.setattr(gpu_tests, "run_gpu_tests", run)
    stages = {"stages": ("smoke", "peers", "tests"), "tests": ("all",), "smoke": ("few",)}
    engine(store, FakeDevice(Clock()), **stages).run()
    assert list(statuses(store)) == ["smoke", *KEYS[7:], "tests"]
    assert statuses(store)["tests"] == "part"
    second = engine(again(store), FakeDevice(Clock()), **stages)
    second.run()
    assert statuses(second.store)["tests"] == "done"
    assert asked == [(("few",), ()), (("all",), ("a",)), (("all",), ("a", "b"))]


def test_a_call_that_is_killed_in_the_tests_keeps_what_an_earlier_one_found(store, monkeypatch):
    seen: list[SuiteFound] = []

    def killed(paths, before, limit_s, printed):
        seen.append(before)
        printed.write_text(f"t.py::test_{len(seen)} PASSED\nt.py::test_b ")
        raise Killed

    part = SuiteFound(passed=1, reached=("a",), complete=False)
    store.put("tests", Outcome(status="part", found=part))
    monkeypatch.setattr(gpu_tests, "run_gpu_tests", killed)
    for _ in range(2):
        with pytest.raises(Killed):
            engine(again(store), FakeDevice(Clock()), stages=("tests",), tests=("all",)).run()
    assert seen == [part, SuiteFound(
        passed=2, reached=("a", "t.py::test_1"), in_flight="t.py::test_b", complete=False
    )]  # fmt: skip
    assert again(store).results.outcomes["tests"].found == seen[1]


def test_a_new_process_takes_the_host_memory_again_and_has_time_for_it(store):
    device = FakeDevice(Clock())
    made = engine(store, device, stages=("probe", "cells"))
    made._host_bytes = 2**30
    made.run()
    runs = [r for r in device.asked if isinstance(r, requests.RunSchedules)]
    assert [run.host_bytes for run in runs] == [2**30] * 4
    limits = device.limits_s[-4:]
    assert limits[0] > limits[1] + 40  # pinning, twice its estimate; the second finds it done


@pytest.mark.parametrize(
    ("attention", "status", "reason"), [("sdpa_cpu", "done", ""), ("flash4", "skipped", "flash4")]
)
def test_kernels_that_are_named_are_tried_and_not_replaced(store, attention, status, reason):
    engine(store, FakeDevice(Clock()), stages=("probe",), attention=attention, vector="eager").run()
    outcome = store.results.outcomes["kernels"]
    assert outcome.status == status and reason in outcome.reason
    if status == "done":
        choice = load_machine(store.profile).attention
        assert choice is not None and (choice.name, choice.kind) == ("sdpa_cpu", "assumed")


def test_nothing_is_measured_with_kernels_that_are_not_right(store):
    store.put("kernels", Outcome(status="failed", attempts=1, reason="no attention is right here"))
    device = FakeDevice(Clock())
    made = engine(store, device, stages=("cells", "peers"))
    made.run()
    assert device.names() == ["RunPeer"] * 3
    assert made.waiting == KEYS[2:7]
