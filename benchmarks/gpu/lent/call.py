"""`python -m benchmarks.gpu.lent.call`: one call on a lent machine, beside a campaign that runs on.

The campaign is a process of its own session, which goes on when the call has returned, so that
nothing is pinned or planned twice. A call starts it where none runs, follows what it says, brings
the results as they are, and ends in time for them to come back.
"""

import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.gpu.exits import run_app
from benchmarks.gpu.jobs.store import CampaignError, read_results
from benchmarks.gpu.report.publish import write_tables
from twinstream.schedule.files import DocumentError, write_bytes, write_text

STARTED = "TWINSTREAM_CALL_STARTED"  # seconds since 1970, set by lent_machine.sh
LONGEST_S = 600.0  # of a command on a lent machine
_START_S = 120.0  # of the machine itself, counted from the time there is
_BACK_S = 25.0  # results and the next call's files on their way
_END_S = 12.0  # to write tables and copy, before the command's own limit
_POLL_S = 0.5
_COPY_EVERY_S = 20.0
_LOG = "printed.txt"
# At most eight files come back, with the tables: of the last three one is there at a time.
_KEPT = (
    "results.json", "profile.toml", "timelines.json.gz", "log.txt", _LOG, "smoke.txt",
    "samples.jsonl", "tests.txt",
)  # fmt: skip
_ARGUMENTS = "arguments"  # those of the campaign that runs


@dataclass(frozen=True)
class Times:
    """Seconds of this call, and of the campaign, from now on."""

    call_s: float
    campaign_s: float


def times(left_s: float, *, fresh: bool, gone_s: float, limit_s: float = LONGEST_S) -> Times:
    """How long a call may take of so much device time, of which a fresh machine took some to start.

    `gone_s` of the command have passed. The campaign goes on until the time is up; the call
    returns by then, or before the command's own limit, `limit_s`.

    >>> times(1800.0, fresh=True, gone_s=10.0)
    Times(call_s=578.0, campaign_s=1645.0)
    >>> times(300.0, fresh=False, gone_s=5.0)
    Times(call_s=258.0, campaign_s=270.0)
    """
    campaign_s = left_s - (_START_S if fresh else 0.0) - _BACK_S - gone_s
    call_s = min(limit_s - gone_s, campaign_s) - _END_S
    return Times(max(0.0, call_s), max(0.0, campaign_s))


@dataclass(frozen=True)
class Call:
    """The campaign's own folder, where results go, and where those of an earlier machine are."""

    folder: Path
    to: Path
    earlier: Path | None
    tell: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic

    def run(self, arguments: Sequence[str], given: Times) -> None:
        """Start or find the campaign, follow it, and bring what it has found."""
        deadline_s = self.clock() + given.call_s
        self.folder.mkdir(parents=True, exist_ok=True)
        self.to.mkdir(parents=True, exist_ok=True)
        if self._is_running() and list(arguments) != (others := self._arguments()):
            self.tell(
                f"the campaign that runs was asked for `{shlex.join(others)}`: it is ended, and "
                f"goes on as `{shlex.join(arguments)}`"
            )
            self.stop()
        if not self._is_running():
            self._begin(arguments, given.campaign_s)
        log, copied_s = self.folder / _LOG, self.clock()
        with log.open(encoding="utf-8", errors="replace") as lines:
            while self.clock() < deadline_s:
                for line in lines:
                    self.tell(line.rstrip("\n"))
                if not self._is_running():
                    break
                if self.clock() - copied_s > _COPY_EVERY_S:
                    _copy_kept(self.folder, self.to)
                    copied_s = self.clock()
                time.sleep(_POLL_S)
            for line in lines:
                self.tell(line.rstrip("\n"))
        _copy_kept(self.folder, self.to)
        runs = self._is_running()
        self._write_tables(told=runs)
        self.tell("the campaign runs on: call again, at once" if runs else "the campaign has ended")

    def stop(self) -> None:
        """End a campaign that runs, and all its processes; its results stay."""
        with_pid = self.folder / "pid"
        if not self._is_running() or not with_pid.exists():
            return
        os.killpg(int(with_pid.read_text(encoding="utf-8")), signal.SIGKILL)
        while self._is_running():
            time.sleep(0.1)

    def _begin(self, arguments: Sequence[str], campaign_s: float) -> None:
        if self.earlier is not None and not (self.folder / "results.json").exists():
            _copy_kept(self.earlier, self.folder)
        command = (sys.executable, "-m", "benchmarks.gpu", "--out", str(self.folder), "--anew",
                   "--minutes", f"{campaign_s / 60.0:.2f}", *arguments)  # fmt: skip
        write_text(json.dumps(list(arguments)), self.folder / _ARGUMENTS)
        with (self.folder / _LOG).open("a", encoding="utf-8") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        write_text(str(process.pid), self.folder / "pid")
        while process.poll() is None and not self._is_running():
            time.sleep(0.05)
        process.returncode = process.returncode or 0  # it may run on: that is no leak to warn of

    def _arguments(self) -> list[str]:
        path = self.folder / _ARGUMENTS
        found: list[str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        return found

    def _is_running(self) -> bool:
        """Whether a campaign holds the folder."""
        held = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(held)
        return False

    def _write_tables(self, *, told: bool) -> None:
        """What there is so far; a campaign that has ended has told it already."""
        try:
            write_tables(read_results(self.folder), self.to)
        except DocumentError as error:  # it ended before it had any
            self.tell(str(error))
            return
        if told:
            self.tell((self.to / "table.md").read_text(encoding="utf-8"))


def _copy_kept(source: Path, to: Path) -> None:
    """What there is now; of what was there before and is no more, nothing stays."""
    for name in _KEPT:
        try:
            content = (source / name).read_bytes()
        except FileNotFoundError:  # a job that ended has taken it into the results
            (to / name).unlink(missing_ok=True)
        else:
            write_bytes(content, to / name)


def _command(  # noqa: PLR0913
    context: typer.Context,
    to: Annotated[Path, typer.Option(help="Where results go: $OUT.")],
    left_s: Annotated[float, typer.Option(help="Device time left when it was called: status's.")],
    timeout_s: Annotated[float, typer.Option(help="The limit of this command.")] = LONGEST_S,
    folder: Annotated[Path, typer.Option(help="The campaign's own.")] = Path(
        "/tmp/twinstream-campaign"
    ),
    earlier: Annotated[
        Path | None, typer.Option(help="Results of an earlier machine, to go on from.")
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="End the campaign that runs, and start another.")
    ] = False,
) -> None:
    """Start or find the campaign, follow it, bring its results; further arguments are its own."""
    now_s = time.time()
    gone_s = max(0.0, now_s - float(os.environ.get(STARTED, now_s)))
    given = times(left_s, fresh=not folder.exists(), gone_s=gone_s, limit_s=timeout_s)
    if given.call_s <= 0.0:
        raise CampaignError(f"{left_s:g} s of device time leave none for a call")
    call = Call(folder, to, earlier, lambda line: print(line, flush=True))
    if restart and folder.exists():
        call.stop()
    call.run(context.args, given)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
        _command
    )
    run_app(app, arguments)


if __name__ == "__main__":
    main()
