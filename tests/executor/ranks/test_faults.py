"""Whatever goes wrong on a rank: one message that names it, in time, and no process is left."""

import socket
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch
from torch.distributed import HashStore

from tests.executor.ranks.faulty import filled_late, going_wrong, summing, unfit, with_a_child
from tests.executor.ranks.talks import fed, taken, value
from tests.helpers.waiting import ended
from twinstream.executor.launch.rank_processes import RankProcesses, execute_ranks
from twinstream.executor.program.options import RunOptions
from twinstream.executor.ranks.errors import RanksDifferError, RanksError, RendezvousError
from twinstream.executor.ranks.world import Patience, StoreAddress, World, open_store, reach_store
from twinstream.schedule.errors import ArgumentError, TwinstreamError

TIMEOUT_S = 2.0
NEVER_S = 600.0
OP = r"op 'all_reduce\.x\.' \(all_reduce\) of pass 2"
# Who dies while it feeds the second pass may not have met the others in the first.
EARLY = OP.replace("pass 2", "pass [12]")
START = """
import sys, time
from twinstream.executor.launch.rank_processes import RankProcesses
if __name__ == "__main__":
    with RankProcesses(2) as processes:
        print(*processes.pids, flush=True)
        time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("how", "message", "timeout_s"),
    [
        ("killed", rf"rank 1 was killed by signal 9 \(SIGKILL\): rank [02] .*{EARLY}", NEVER_S),
        ("exits", rf"rank 1 ended with exit code 7: rank [02] .*{EARLY}", NEVER_S),
        ("stopped", rf"rank 1 does not answer: rank [02] .* waited 2 s .*{OP}", TIMEOUT_S),
        ("sleeps", rf"rank 1 does not get there: rank [02] .* waited 2 s .*{OP}", TIMEOUT_S),
        ("refuses", "^rank 1: the data ends here$", NEVER_S),
        ("has a bug", "^rank 1: ZeroDivisionError: by nothing$", NEVER_S),
    ],
    ids=["killed", "exits", "stopped", "sleeps", "refuses", "bug"],
)
def test_the_rank_is_named_and_all_end_in_time(how, message, timeout_s):
    """Only a rank that hangs is waited for until the timeout; of all others one hears at once."""
    schedule = summing(3)
    patience = Patience(timeout_s)
    with RankProcesses(3, patience, start_method="forkserver") as processes:
        pids = processes.pids
        processes.execute(schedule, partial(going_wrong, "not"), RunOptions(num_passes=1))
        begin_s = time.monotonic()
        with pytest.raises(RanksError, match=message) as raised:
            processes.execute(schedule, partial(going_wrong, how), RunOptions(num_passes=5))
        assert time.monotonic() - begin_s < NEVER_S
        assert len(str(raised.value).splitlines()) == 1
        assert ("Traceback" in raised.value.details) == (how == "has a bug")
        assert ended(pids)


def test_no_op_waits_for_a_rank_whose_state_comes_late():
    with RankProcesses(2, Patience(timeout_s=2.0), start_method="forkserver") as processes:
        processes.execute(summing(2), filled_late, RunOptions(num_passes=2))


def test_what_all_ranks_say_is_said_once_and_processes_of_ranks_end_too(tmp_path):
    schedule = summing(2)
    with (
        RankProcesses(2, start_method="forkserver") as processes,
        pytest.raises(RanksError, match=r"^(rank [01]: )?there is no such data$"),
    ):
        processes.execute(schedule, unfit, RunOptions())
    noted = tmp_path / "child"
    with (
        RankProcesses(2, start_method="forkserver") as processes,
        pytest.raises(RanksError, match="rank 1 was killed"),
    ):
        processes.execute(schedule, partial(with_a_child, noted), RunOptions(num_passes=4))
    assert ended([int(noted.read_text(encoding="utf-8"))])


def test_ranks_are_started_run_and_ended_in_one_call():
    outcomes = execute_ranks(summing(2), fed, RunOptions(num_passes=2))
    total = value(0, "x", 1, 1000, "float32") + value(1, "x", 1, 1000, "float32")
    assert all(torch.equal(taken(outcome, "x", 1), total) for outcome in outcomes)


def test_ranks_end_with_the_process_that_started_them():
    started = subprocess.Popen([sys.executable, "-c", START], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    pids = [int(pid) for pid in started.stdout.readline().split()]
    assert len(pids) == 2
    started.kill()
    started.wait()
    started.stdout.close()
    assert ended(pids)


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RendezvousError, match=f"port {port}, .* is in use"):
            execute_ranks(summing(2), unfit, RunOptions(), port=port)


def test_nobody_else_reaches_the_store_where_ranks_meet():
    store = open_store(None)
    reach_store(StoreAddress(store.port), Patience()).set("met", "yes")
    assert store.get("met") == b"yes"
    with pytest.raises(ConnectionRefusedError):  # which one that listens everywhere would take
        socket.create_connection(("127.0.0.2", store.port), timeout=10).close()


def test_another_number_of_processes_is_refused(four):
    with pytest.raises(ArgumentError, match="of 2 ranks, and there are processes for 4"):
        four.execute(summing(2), unfit, RunOptions())


# --- what must be the same


def said(claims: list[dict[str, str]], patience: Patience) -> list[TwinstreamError | None]:
    """What each of several ranks raises when these claims are made."""
    store, found = HashStore(), [None] * len(claims)

    def say(rank: int) -> None:
        try:
            World(rank, 3, store, patience).require_same("all", claims[rank])
        except TwinstreamError as error:
            found[rank] = error

    threads = [threading.Thread(target=say, args=(rank,)) for rank in range(len(claims))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ranks_that_say_otherwise_than_rank_0_are_named_by_all():
    same = {"twinstream": "1.2", "torch": "2.13"}
    assert said([same, same, same], Patience()) == [None, None, None]
    found = said([same, same, {**same, "twinstream": "1.1"}], Patience())
    assert {type(error) for error in found} == {RanksDifferError}
    assert {str(error) for error in found} == {
        "rank 2 has twinstream 1.1, and rank 0 has 1.2: all ranks need the same"
    }


def test_a_rank_that_does_not_come_is_named():
    found = said([{"torch": "2"}, {"torch": "2"}], Patience(start_s=0.3))
    assert {type(error) for error in found} == {RendezvousError}
    assert all("waited 0.3 s for rank 2, which did not come" in str(error) for error in found)
