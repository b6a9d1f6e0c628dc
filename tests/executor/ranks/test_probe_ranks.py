"""Links between processes, measured: what is exchanged, what is written, and how it is found."""

import os
import signal

import pytest

from tests.front_door.command_line import error_of
from twinstream import ranks_probe
from twinstream.clusters.running.places import keep_links, place_of_ranks_here
from twinstream.executor.launch.rank_processes import RankProcesses
from twinstream.executor.ranks.errors import RanksError
from twinstream.hardware_profiles.clusters.curves import COLLECTIVES
from twinstream.hardware_profiles.clusters.loader import load_cluster, save_with_node
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.collectives.rank_group import on_one_node
from twinstream.hardware_profiles.collectives.timing import collective_time_ns
from twinstream.hardware_profiles.loader import load_machine
from twinstream.ranks_probe import RanksProbeError, collectives_schedule, probe_ranks
from twinstream.schedule.cluster.projecting import all_channels
from twinstream.schedule.cluster.verify import require_safe

CPU = load_machine("cpu")


@pytest.fixture(scope="module")
def probed(two: RankProcesses) -> Cluster:
    return probe_ranks(two, CPU, 0.0, "cpu")


@pytest.mark.parametrize(("num_ranks", "groups"), [(2, {2}), (4, {2, 4}), (12, {2, 4, 12})])
def test_a_pass_has_every_collective_among_all_ranks_and_parts_of_them(num_ranks, groups):
    schedule = collectives_schedule(num_ranks, 4096)
    require_safe(schedule)
    ops = schedule.of(schedule.classes[0]).ops
    assert len(ops) == 2 + 6 * len(groups)
    assert {len(one.members) for one in all_channels(schedule)} == groups | {2}


def test_what_was_measured_is_written_and_read(probed, tmp_path):
    path = tmp_path / "here.toml"
    save_with_node(probed, CPU, path)
    assert load_cluster(path).curves == probed.curves
    assert {curve.collective for curve in probed.curves} == set(COLLECTIVES)
    assert "gloo" in probed.curves[0].source


def test_no_size_takes_longer_than_a_larger_one(probed):
    for curve in probed.curves:
        times = [time_ns for _, time_ns in curve.points]
        assert len(times) == 4
        assert times == sorted(times)


def test_sums_in_rank_order_have_a_curve_of_their_own(probed):
    by_sums = {one.sums: one for one in probed.curves if one.collective == "all_reduce"}
    assert set(by_sums) == {"library", "rank_order"}
    for sums, curve in by_sums.items():
        found = collective_time_ns(probed, "all_reduce", 2**16, on_one_node(2), "half", sums)
        assert found == (-(-curve.time_ns(2**16) // 1), "curve", False)


def test_a_curve_is_never_faster_at_a_smaller_size(probed):
    curve = probed.curves[0].model_copy(update={"points": ((1, 9.0), (2, 4.0), (3, 5.0))})
    assert ranks_probe._risen(curve).points == ((1, 4.0), (2, 4.0), (3, 5.0))


def test_messages_that_are_all_latency_tell_no_endless_rate(probed):
    curve = next(one for one in probed.curves if one.collective == "send_recv")
    flat = curve.model_copy(update={"points": tuple((size, 1e6) for size, _ in curve.points)})
    cluster = ranks_probe._cluster(CPU, 2, (flat,), "an example")
    assert cluster.number("node_bytes_per_s") == pytest.approx(10 * 2**18 / 1e-3)


def test_a_size_that_would_exceed_the_time_is_not_begun(probed, two, monkeypatch):
    clock, sizes = [0.0], []

    def measured(processes: RankProcesses, size: int, backend: str) -> int:
        sizes.append(size)
        clock[0] += size / 2**20
        return size

    monkeypatch.setattr(ranks_probe, "monotonic", lambda: clock[0])
    monkeypatch.setattr(ranks_probe, "_measured", measured)
    monkeypatch.setattr(ranks_probe, "_spread", lambda runs: 0.1)
    monkeypatch.setattr(ranks_probe, "measured_curves", lambda runs, told: probed.curves)
    probe_ranks(two, CPU, 6.0, "cpu")
    assert sizes == [2**12, 2**14, 2**16, 2**18, 2**20, 2**22]  # 5.3 s; the next takes 16


def test_a_rank_that_is_killed_ends_the_probe_with_one_message():
    with RankProcesses(2, start_method="forkserver") as processes:

        def kill() -> None:
            os.kill(processes.pids[1], signal.SIGKILL)

        with pytest.raises(RanksError, match="rank 1 was killed by signal 9"):
            probe_ranks(processes, CPU, 0.0, "cpu", kill)


@pytest.mark.parametrize(
    ("given", "said"),
    [(("-o", "links.json"), "name the profile links.toml"),
     (("--disk", "."), "--ranks goes without --model and --disk")],
)  # fmt: skip
def test_what_links_are_not_is_said_before_anything_is_measured(given, said):
    assert said in error_of("probe", "--ranks", 2, *given)


def test_far_more_ranks_than_cores_are_refused():
    assert "ranks are timed" in error_of("probe", "--ranks", 1 << 20, "--backend", "cpu")


def test_one_rank_has_no_links(one):
    with pytest.raises(RanksProbeError, match="two ranks or more"):
        probe_ranks(one, CPU, 0.0, "cpu")


def test_runs_of_as_many_ranks_find_the_links(probed, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assumed = place_of_ranks_here(CPU, 2)
    keep_links(probed, CPU)
    found = place_of_ranks_here(CPU, 2)
    assert found.cluster.curves == probed.curves
    assert found.machine == assumed.machine
    assert "links of 1 GB/s" not in found.assumed
    assert not place_of_ranks_here(CPU, 4).cluster.curves
    assert place_of_ranks_here(CPU, 2, num_hosts=2) != found
    next(tmp_path.rglob("links-of-2*[0-9a-f].toml")).write_text("damaged")
    assert place_of_ranks_here(CPU, 2) == assumed
