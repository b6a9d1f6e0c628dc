"""What a run says beside its figures: host time, device memory, bars."""

import io

import pytest
from rich.console import Console

from twinstream.commands import output
from twinstream.schedule.timeline import DeviceMemory, HostCost, Provenance
from twinstream.screens.run_report import provenance_lines

GIB = 2**30
HERE = Provenance(kind="measured", where="here")
COST = HostCost(
    num_passes=2,
    ns_per_op=5250.0,
    ns_per_call={"graph": 9000.0, "copy": 2500.0},
    calls_per_pass={"graph": 3.0, "copy": 10.0},
    waited_ns_per_pass=1.5e6,
)
MEMORY = DeviceMemory(
    arena_bytes=20 * GIB,
    cap_bytes=24 * GIB,
    reserve_bytes=2 * GIB,
    before_bytes=GIB // 2,
    warm_bytes=21 * GIB,
    peak_bytes=21 * GIB,
    libraries_bytes=GIB // 4,
)


def lines(**fields: object) -> list[str]:
    return provenance_lines(HERE.model_copy(update=fields))


def test_a_run_without_such_figures_says_nothing():
    assert lines() == []


def test_the_hosts_time_is_told_by_op_and_by_kind_of_call():
    (line,) = lines(host_cost=COST)
    assert "5.2 us to enqueue an op (a step: 10 copy at 2.5 us, 3 graph at 9.0 us)" in line
    assert "blocked 1.5 ms of a step" in line
    (line,) = lines(host_cost=COST.model_copy(update={"ops_timed": True}))
    assert "3 graph at 9.0 us, every op timed)" in line


def test_device_memory_is_told_with_what_lies_beside_the_arena():
    (line,) = lines(device_memory=MEMORY)
    assert "peak 21.00 GiB, of which 1.00 GiB beside the arena (256.00 MiB of them" in line
    assert "the plan reserves 2.00 GiB." in line
    assert "exceeded" not in line
    assert "declares" not in line


def test_more_than_the_cap_and_more_than_declared_are_flagged_with_what_to_do():
    over = MEMORY.model_copy(
        update={"peak_bytes": 25 * GIB, "temporary_bytes": {"head": 3 * GIB, "block": GIB}}
    )
    (line,) = lines(device_memory=over)
    assert "The cap is exceeded by 1.00 GiB: raise device_reserve_bytes" in line
    assert "'head' allocates 3.00 GiB for itself, 3.00 GiB more than the plan declares" in line


# --- bars


@pytest.fixture
def terminal(monkeypatch) -> io.StringIO:
    shown = io.StringIO()
    monkeypatch.setattr(
        output, "_Screen", lambda stderr: Console(file=shown, force_terminal=True, width=100)
    )
    return shown


def test_a_bar_shows_the_steps_and_what_is_pinned_until_all_is(terminal):
    with output.progress("training tiny", 4) as stage:
        stage.pinned(2 * GIB, 2 * GIB)
    assert "pinned" not in terminal.getvalue()
    with output.progress("training tiny", 4) as stage:
        stage.pinned(GIB, 2 * GIB)
        stage()
    assert "1 of 4, 1.00 GiB of 2.00 GiB of host memory pinned" in terminal.getvalue()


def test_quietly_there_are_no_bars(terminal):
    with output.progress("training tiny", 4, quiet=True) as stage:
        stage.pinned(1, 2)
        stage()
    assert terminal.getvalue() == ""
