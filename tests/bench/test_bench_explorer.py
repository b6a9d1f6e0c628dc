"""Seconds until the explorer's page shows an answer, in headless Chromium; `pytest -m bench -s`.

The page itself notes when the number is painted and when the last figure is drawn.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from tests.helpers.browser import browser_page
from twinstream.study.explore.answers import State

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.bench
PORT = 8077
ADDRESS = f"http://127.0.0.1:{PORT}/"
CAPS = ("20GiB", "28GiB", "32GiB", "40GiB", "48GiB")
WATCH = """
window.seen = {};
document.addEventListener("keydown", () => { seen = {entered: performance.now()}; }, true);
document.addEventListener("DOMContentLoaded", () => new MutationObserver(() => {
  const told = document.querySelector(".machine code")?.textContent;
  if (told && told !== window.told) {
    window.told = told;
    requestAnimationFrame(() => requestAnimationFrame(() => { seen.number = performance.now(); }));
  }
  for (const plot of document.querySelectorAll("[id^=timeline-] .js-plotly-plot"))
    if (plot.on && !plot.watched)
      plot.watched = !!plot.on("plotly_afterplot",
        () => { seen[plot.parentElement.id] = performance.now(); });
}).observe(document.body, {subtree: true, childList: true, characterData: true}));
"""
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
    ("machines", "policy", "effort"),
    [
        ("h100", "optimal", "quick"),
        ("h100,rtx5090", "optimal", "quick"),
        ("h100", "optimal", "normal"),
        ("h100", "streaming", "normal"),
    ],
)
def test_seconds_to_load_and_to_update(server, machines, policy, effort):
    state = State(machines=machines, policy=policy, effort=effort)
    last = machines.split(",")[-1]
    with browser_page() as opened:
        page = opened.page
        page.add_init_script(WATCH)
        start_s, start_cpu_s = time.perf_counter(), cpu_s(server)
        page.goto(ADDRESS + state.url)
        page.wait_for_selector(f"#timeline-{last} .main-svg", timeout=300_000)
        load = time.perf_counter() - start_s, cpu_s(server) - start_cpu_s
        updates = [one_update(page, last, cap, server) for cap in CAPS]
        assert page.inner_text(f"#speed-{last}")
        assert opened.complaints == []
    number, figures, cpu = (median(one[i] for one in updates) for i in range(3))
    print(
        f"\n| {machines}, {policy}, {effort} | {load[0]:.1f} s ({load[1]:.1f} s) | "
        f"{number:.1f} s | {figures:.1f} s ({cpu:.1f} s) | load {os.getloadavg()[0]:.1f}"
    )


def one_update(page: "Page", last: str, cap: str, server: int) -> tuple[float, float, float]:
    """Seconds until the number, until the last figure; the server's CPU seconds."""
    page.wait_for_timeout(1_000)
    start_cpu_s = cpu_s(server)
    page.fill("#device_mem", cap)
    page.press("#device_mem", "Enter")
    told = f"cap {cap.removesuffix('GiB')}.00 GiB"
    page.wait_for_selector(f"#timeline-{last} >> text={told}", timeout=300_000)
    page.wait_for_function(f"seen['timeline-{last}'] > seen.number", timeout=300_000)
    used_s = cpu_s(server) - start_cpu_s
    seen = page.evaluate("seen")
    figure_ms = seen[f"timeline-{last}"]
    return (seen["number"] - seen["entered"]) / 1e3, (figure_ms - seen["entered"]) / 1e3, used_s
