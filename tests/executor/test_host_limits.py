"""How much host memory there is: RLIMIT_MEMLOCK, the cgroup and /proc, on fake roots."""

import resource
from pathlib import Path

import pytest

from twinstream.executor.memory import host_limits as host_limits_module
from twinstream.executor.memory.host_limits import (
    AvailableMemoryError,
    HostLimits,
    HostMemoryError,
    check_host_memory,
    host_limits,
)
from twinstream.schedule.errors import TwinstreamError

GIB = 2**30
MEMINFO = "MemTotal:       32000000 kB\nMemFree:         1000000 kB\nMemAvailable:    8000000 kB\n"


def root_with(tmp_path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def v2(limit: str, used: int, stat: str = "anon 5\nfile 700\nkernel 3\n") -> dict[str, str]:
    return {
        "sys/fs/cgroup/memory.max": f"{limit}\n",
        "sys/fs/cgroup/memory.current": f"{used}\n",
        "sys/fs/cgroup/memory.stat": stat,
    }


def v1(limit: int, used: int, stat: str = "cache 700\nrss 5\n") -> dict[str, str]:
    return {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{limit}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{used}\n",
        "sys/fs/cgroup/memory/memory.stat": stat,
    }


def test_available_memory_is_that_of_proc_in_bytes(tmp_path):
    found = host_limits(root_with(tmp_path, {"proc/meminfo": MEMINFO}))
    assert found.available_bytes == 8_000_000 * 1024


@pytest.mark.parametrize("files", [v2("10000", 3000), v1(10_000, 3000)], ids=["v2", "v1"])
def test_a_cgroup_leaves_its_limit_less_what_is_used_and_cannot_be_reclaimed(tmp_path, files):
    assert host_limits(root_with(tmp_path, files)).cgroup_left_bytes == 10_000 - 3000 + 700


@pytest.mark.parametrize(
    "files",
    [
        {},
        v2("max", 3000),
        v1(9_223_372_036_854_771_712, 3000),  # what v1 says for no limit
        {"sys/fs/cgroup/memory.max": "10000\n"},
    ],
    ids=["none", "v2", "v1", "use unknown"],
)
def test_a_cgroup_without_a_limit_is_no_limit(tmp_path, files):
    assert host_limits(root_with(tmp_path, files)).cgroup_left_bytes is None


def test_the_tightest_of_the_process_cgroup_and_those_around_it_counts(tmp_path):
    inner = {
        "proc/self/cgroup": "0::/slice/job\n",
        "sys/fs/cgroup/slice/job/memory.max": "max\n",
        "sys/fs/cgroup/slice/memory.max": "5000\n",
        "sys/fs/cgroup/slice/memory.current": "1000\n",
    }
    found = host_limits(root_with(tmp_path, v2("10000", 3000) | inner))
    assert found.cgroup_left_bytes == 4000


@pytest.mark.parametrize(("soft", "expected"), [(65536, 65536), (resource.RLIM_INFINITY, None)])
def test_the_soft_limit_of_locked_memory_counts(monkeypatch, tmp_path, soft, expected):
    monkeypatch.setattr(host_limits_module.resource, "getrlimit", lambda which: (soft, 2**40))
    assert host_limits(tmp_path).memlock_bytes == expected


# --- the check


def test_what_fits_passes_and_unknown_limits_refuse_nothing():
    check_host_memory(2 * GIB, HostLimits(0, 2 * GIB, 3 * GIB))
    check_host_memory(2**60, HostLimits(None, None, None))


@pytest.mark.parametrize(
    ("limits", "error", "message"),
    [
        (
            HostLimits(None, GIB, 0),
            HostMemoryError,
            r"the cgroup's limit leaves 1\.00 GiB; raise the container's",
        ),
        (
            HostLimits(None, None, GIB),
            AvailableMemoryError,
            r"available memory leaves 1\.00 GiB; free memory",
        ),
    ],
)
def test_the_message_names_both_sizes_the_limit_and_a_remedy(limits, error, message):
    with pytest.raises(error, match=message) as raised:
        check_host_memory(GIB + 1, limits)
    assert type(raised.value) is error
    assert "the host arena needs 1.00 GiB" in str(raised.value)
    assert "or plan with a smaller --host-mem" in str(raised.value)
    overridable = error is AvailableMemoryError
    assert (f"set {host_limits_module.AVAILABLE}=SIZE" in str(raised.value)) == overridable


def test_what_is_said_to_be_available_is_in_place_of_the_systems_word(monkeypatch, tmp_path):
    root = root_with(tmp_path, {"proc/meminfo": "MemAvailable: 1024 kB\n"})
    assert host_limits(root).available_bytes == 2**20
    monkeypatch.setenv(host_limits_module.AVAILABLE, "2GiB")
    assert host_limits(root).available_bytes == 2 * GIB
    monkeypatch.setenv(host_limits_module.AVAILABLE, "much")
    with pytest.raises(TwinstreamError, match="cannot read the size 'much'"):
        host_limits(root)
