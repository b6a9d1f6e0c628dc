"""The error of a plan that cannot fit, with what would."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.sizes import as_cap, gib

_MUCH = 0.1  # of what is needed


@dataclass(frozen=True)
class Shortage:
    """Which cap is short, by how much, and where; and the smallest caps that would do.

    Where they are not known to be the `smallest`, they would do, and less may, too.
    `library_bytes` of the device are what a kernel's library takes by itself, whatever is planned;
    `device_has_bytes` and `host_has_bytes` are what the machine has, where that is known;
    `fixed_cut` are the options by which the user cut the step, so that other ways were not tried.
    """

    policy: str
    cap: Literal["device", "host"]
    cap_bytes: int
    needed_bytes: int
    task: str
    smallest_device_bytes: int | None
    smallest_host_bytes: int | None
    library_bytes: int = 0
    device_has_bytes: float | None = None
    host_has_bytes: float | None = None
    fixed_cut: tuple[str, ...] = ()
    smallest: bool = True


class InfeasiblePlan(TwinstreamError):
    """No schedule of the policy fits the caps.

    `shortage.smallest_device_bytes` is the smallest device cap that would do at the given host
    cap, `smallest_host_bytes` the reverse; None where no such cap exists. Of `optimal` they are
    known to be the smallest with effort `thorough` only (`shortage.smallest`).
    """

    def __init__(self, shortage: Shortage) -> None:
        self.shortage = shortage
        flag = "--device-mem" if shortage.cap == "device" else "--host-mem"
        missing, cap = shortage.needed_bytes - shortage.cap_bytes, _gib(shortage.cap_bytes)
        if missing > 0:
            told = (
                f"needs {_gib(shortage.needed_bytes)} of {shortage.cap} memory at task "
                f"'{shortage.task}', {missing:,} bytes ({_gib(missing)}) more than {flag} {cap} "
                "allows"
            )
        else:  # no one cap is short: both are
            told = f"finds no plan within {flag} {cap} and the other cap"
        super().__init__(
            f"policy '{shortage.policy}' {told}. {_advice(shortage)}{_aside(shortage)}"
        )

    def at(self, task: str) -> "InfeasiblePlan":
        """The same, at another task."""
        return InfeasiblePlan(replace(self.shortage, task=task))

    def on(
        self, device_has_bytes: float | None, host_has_bytes: float | None, fixed_cut: Sequence[str]
    ) -> "InfeasiblePlan":
        """The same, of a machine with so much memory and a step that is cut as the user said."""
        return InfeasiblePlan(
            replace(
                self.shortage, device_has_bytes=device_has_bytes, host_has_bytes=host_has_bytes,
                fixed_cut=tuple(fixed_cut),
            )
        )  # fmt: skip


def least_short(errors: Sequence[InfeasiblePlan]) -> InfeasiblePlan:
    """Of refusals within the same caps, one at least: what would do by any of them.

    The task is where that takes its most.
    """
    shortages = [error.shortage for error in errors]
    device = min(filter(None, (s.smallest_device_bytes for s in shortages)), default=None)
    host = min(filter(None, (s.smallest_host_bytes for s in shortages)), default=None)
    last = shortages[-1]
    with_that = (s for s in shortages if s.cap == last.cap)
    least = min(with_that, key=lambda shortage: shortage.needed_bytes)
    return InfeasiblePlan(replace(least, smallest_device_bytes=device, smallest_host_bytes=host))


def _advice(shortage: Shortage) -> str:
    """Caps to type, or machines to have, that would do; ways to cut only where some are untried."""
    options, machines = [], []
    for side, least, has in (
        ("device", shortage.smallest_device_bytes, shortage.device_has_bytes),
        ("host", shortage.smallest_host_bytes, shortage.host_has_bytes),
    ):
        if least is None:
            continue
        if has is None or least <= has:
            options.append(f"--{side}-mem {as_cap(least)}")
        else:
            machines.append(
                f"a machine with {_gib(least)} of {side} memory (this one has {_gib(round(has))})"
            )
    cut = ""
    if shortage.fixed_cut:
        cut = f" Without {' and '.join(shortage.fixed_cut)} other ways to cut the step are tried."
    if options or machines:
        less = "" if shortage.smallest else " Less may do, too: effort thorough tells."
        return f"What would do: {' or '.join([*options, *machines])}.{less}{cut}"
    none = "would do" if shortage.smallest else "is known to do"
    more = "" if shortage.smallest else " More effort may find one (--effort)."
    return f"No larger cap on one side alone {none}: raise both.{more}{cut}"


def _aside(shortage: Shortage) -> str:
    """Of much memory that other kernels may not take."""
    if shortage.cap != "device" or shortage.library_bytes < _MUCH * shortage.needed_bytes:
        return ""
    return (
        f" Of the device, {_gib(shortage.library_bytes)} are for what attention's library "
        "allocates by itself while it runs; another (--attention) may take less."
    )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.3f} GiB" if size_bytes >= 2**30 else gib(size_bytes)
