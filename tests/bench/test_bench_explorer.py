"""Seconds until the explorer's page shows an answer, in headless Chromium; `pytest -m bench -s`."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from tests.helpers.browser import browser_page
from twinstream.explorer.state import State

pytestmark = pytest.mark.bench
PORT = 8077
ADDRESS = f"http://127.0.0.1:{PORT}/"
CAPS = ("20GiB", "28GiB", "32GiB", "40GiB", "48GiB")
MAIN = "from twinstream.cli import main; main()"


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    """Process id of `twinstream explore`."""
    command = [sys.executable, "-c", MAIN, "explore", "--port", str(PORT)]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        for _ in range(600):
            try:
                urlopen(ADDRESS, timeout=5).close()
                break
            except URLError:
                time.sleep(0.1)
        yield running.pid
    finally:
        running.terminate()
        running.wait()


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    ("machines", "policy", "caps"),
    [
        ("h100", "streaming", CAPS),
        ("h100,rtx5090", "streaming", CAPS),
        ("h100", "optimal", CAPS[:2]),
    ],
)
def test_seconds_to_load_and_to_update(server, machines, policy, caps):
    state = State(machines=machines, policy=policy)
    last = machines.split(",")[-1]
    with browser_page() as opened:
        page = opened.page
        start_s, start_cpu_s = time.perf_counter(), cpu_s(server)
        page.goto(ADDRESS + state.url)
        page.wait_for_selector(f"#timeline-{last} .main-svg", timeout=300_000)
        load = time.perf_counter() - start_s, cpu_s(server) - start_cpu_s
        updates = []
        for cap in caps:
            start_s, start_cpu_s = time.perf_counter(), cpu_s(server)
            page.fill("#device_mem", cap)
            page.press("#device_mem", "Enter")
            page.wait_for_selector(f"code:has-text('--device-mem {cap}')", timeout=300_000)
            page.wait_for_selector(f"#timeline-{last} .main-svg", timeout=300_000)
            updates.append((time.perf_counter() - start_s, cpu_s(server) - start_cpu_s))
        assert page.inner_text(f"#speed-{last}")
        assert opened.complaints == []
    elapsed, cpu = (median(one[i] for one in updates) for i in (0, 1))
    print(
        f"\n| {machines}, {policy} | {load[0]:.1f} s ({load[1]:.1f} s) | "
        f"{elapsed:.1f} s ({cpu:.1f} s) | load of the machine {os.getloadavg()[0]:.1f}"
    )
