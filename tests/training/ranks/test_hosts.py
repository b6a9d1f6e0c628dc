"""Ranks on two machines, here two process groups: bits, and what a lost machine leaves."""

import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.helpers.ports import free_port
from tests.helpers.waiting import comes, ended
from tests.training.ranks.rank_runs import STEPS, one_device, rank_options
from tests.training.small_runs import state_files, trained
from twinstream.clusters.shared_machine import place_here
from twinstream.executor.launch import hosts
from twinstream.executor.ranks.errors import RendezvousError
from twinstream.executor.ranks.torchrun import StartedRank
from twinstream.executor.ranks.world import Patience
from twinstream.hardware_profiles.loader import load_machine
from twinstream.log.run_files import OPTIONS
from twinstream.schedule.errors import ArgumentError
from twinstream.training.options import OptionsError, TrainOptions, write_options

PATIENCE = Patience(timeout_s=20, start_s=20)


def start(wanted: TrainOptions, rank: int, port: int) -> subprocess.Popen[str]:
    """One rank of two, alone on its machine."""
    folder = wanted.output.with_name("wanted")
    folder.mkdir(exist_ok=True)
    write_options(wanted, folder)
    told = {
        "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "twinstream", "train", str(folder / OPTIONS)],
        env=os.environ | told, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_two_machines_train_with_the_bits_of_one_device(tmp_path: Path) -> None:
    state, _ = one_device(tmp_path / "one")
    wanted = rank_options(tmp_path / "b", pp=2)
    both = [start(wanted, rank, port) for port in [free_port()] for rank in (1, 0)]
    told = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert "on 2 ranks" in told[1] and "between machines" in told[1] and told[0] == ""
    assert state_files(wanted.output, STEPS) == state


def test_a_lost_machine_ends_the_run_with_one_message_and_it_goes_on_elsewhere(
    tmp_path: Path,
) -> None:
    state, _ = one_device(tmp_path / "one")
    wanted = rank_options(tmp_path / "b", pp=2, save_every="1")
    lost, kept = (start(wanted, rank, port) for port in [free_port()] for rank in (1, 0))
    assert comes(lambda: (wanted.output / "checkpoint-1").exists() or kept.poll() is not None)
    os.killpg(lost.pid, signal.SIGKILL)
    told = kept.communicate(timeout=300)[0]
    lost.communicate(timeout=60)
    assert kept.returncode == 2
    errors = [line for line in told.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "rank 1 is gone: its process on another machine" in errors[0]
    again = rank_options(tmp_path / "b", pp=2, ranks=2)
    trained(again, resume=True)
    assert state_files(wanted.output, STEPS) == state


def test_where_rank_0_is_killed_no_rank_is_left(tmp_path: Path) -> None:
    wanted = rank_options(tmp_path, pp=2, save_every="1")
    other, first = (start(wanted, rank, port) for port in [free_port()] for rank in (1, 0))
    assert comes(lambda: (wanted.output / "checkpoint-1").exists() or first.poll() is not None)
    first.kill()
    first.communicate(timeout=60)
    assert other.wait(timeout=120) == 1
    assert ended([other.pid])
    other.communicate()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
        ({"RANK": "two"}, "RANK='two' is no whole number"),
        ({"LOCAL_WORLD_SIZE": "3"}, "every machine has to have as many ranks"),
        ({"RANK": "4"}, "RANK=4, WORLD_SIZE=4"),
    ],
)
def test_variables_that_contradict_one_another_are_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str | None], said: str
) -> None:
    known = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
             "LOCAL_WORLD_SIZE": "2"}  # fmt: skip
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    assert StartedRank.here() == StartedRank(3, 4, 1, 2, "10.0.0.1", 29500)
    for name, changed in changes.items():
        if changed is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, changed)
    with pytest.raises(ArgumentError, match=said):
        StartedRank.here()


def test_a_stranger_does_not_become_a_rank_and_a_rank_that_does_not_come_is_named() -> None:
    me = StartedRank(0, 2, 0, 1, "127.0.0.1", free_port())
    knock = """
import socket, sys
from multiprocessing.connection import Connection
from torch.distributed import PrefixStore, TCPStore
store = PrefixStore("twinstream/0", TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False))
store.wait(["trainer"])
port = store.get("trainer").decode().split()[0]
Connection(socket.create_connection(("127.0.0.1", int(port))).detach()).send_bytes(b"I am rank 1")
"""
    stranger = subprocess.Popen([sys.executable, "-c", knock, str(me.port)])
    with pytest.raises(
        RendezvousError, match=r"waited 8 s at 127\.0\.0\.1 for rank 1, which did not"
    ):
        hosts.meet_ranks(me, Patience(start_s=8))
    assert stranger.wait(60) == 0


def test_a_rank_comes_with_the_key() -> None:
    me = StartedRank(0, 2, 0, 1, "127.0.0.1", free_port())
    come = f"""
from twinstream.executor.launch import hosts
from twinstream.executor.ranks.torchrun import StartedRank
hosts.serve_host = lambda pipe, rank, local_rank: pipe.send((rank, local_rank))
hosts.work_for_trainer(StartedRank(1, 2, 0, 1, "127.0.0.1", {me.port}))
"""
    rank = subprocess.Popen([sys.executable, "-c", come])
    found = hosts.meet_ranks(me, PATIENCE)
    (pipe,) = found.pipes
    assert isinstance(pipe, Connection) and pipe.recv() == (1, 0)
    assert rank.wait(60) == 0


def test_machines_share_what_is_assumed_between_them() -> None:
    place = place_here(load_machine("cpu"), 2, 2, num_hosts=2)
    assert place.cluster.count("gpus_per_node") == 2
    assert place.cluster.number("nic_bytes_per_s") == 1.25e9
    assert place.assumed.endswith("10 Gbit/s and 100 us between machines")
    of_gpus = place_here(load_machine("rtx4090"), 2, 2, nvlink=False, num_hosts=2)
    assert of_gpus.cluster.number("nic_bytes_per_s") > 0
    with pytest.raises(OptionsError, match=r"^3 ranks are not as many on each of 2 machines"):
        TrainOptions.of({"model": "8b", "data": ("a",), "output": "b", "ranks": 3, "hosts": 2})
