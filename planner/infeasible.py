"""The error of a plan that does not fit, with the caps that would do."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.sizes import as_cap, gib

_MUCH = 0.1  # of what is needed


DriveUse = Literal["read", "written"] | None  # "read": of what no task changes, alone


@dataclass(frozen=True)
class Shortage:
    """Which cap is short, by how much, and where; and caps that would do.

    Of a rule, `needed_bytes` are what its plan takes, and the caps named are the smallest that
    would do. Of `optimal` no plan was found: any takes the `proven` (device, host) bytes at the
    least, each with the other cap as it is (None where no size would do), and the caps named were
    tried and fit; less may do. `library_bytes` of the device are what a kernel's library takes by
    itself, whatever is planned; `device_has_bytes` and `host_has_bytes` are what the machine has,
    where that is known; `fixed_options` are those by which the user cut the step, so that other
    ways were not tried; `leaner_options` are those that take less memory and were not given.
    `other_cap_bytes` is the cap of the other memory, None where there is none; `given` are the
    memories whose caps the user gave; `drive` is how one could help that was not named: frozen
    weights are read from it, or what is trained is written there.
    """

    policy: str
    cap: Literal["device", "host"]
    cap_bytes: int
    needed_bytes: int
    task: str
    enough_device_bytes: int | None
    enough_host_bytes: int | None
    library_bytes: int = 0
    device_has_bytes: float | None = None
    host_has_bytes: float | None = None
    fixed_options: tuple[str, ...] = ()
    proven: tuple[int | None, int | None] | None = None
    other_cap_bytes: int | None = None
    leaner_options: tuple[str, ...] = ()
    given: tuple[str, ...] = ("device", "host")
    drive: DriveUse = None

    @property
    def less_may_do(self) -> bool:
        """Whether less than the caps named may do, too."""
        return self.proven is not None


class InfeasiblePlan(TwinstreamError):
    """No schedule of the policy fits the caps.

    `shortage.enough_device_bytes` is a device cap that would do at the given host cap,
    `enough_host_bytes` the reverse; None where none is known.
    """

    def __init__(self, shortage: Shortage) -> None:
        self.shortage = shortage
        reason = _needed(shortage) if shortage.proven is None else _proven(shortage)
        super().__init__(f"{reason}. {_advice(shortage)}{_aside(shortage)}{_leaner(shortage)}")

    def at(self, task: str) -> "InfeasiblePlan":
        """Return the same refusal, at another task."""
        return InfeasiblePlan(replace(self.shortage, task=task))

    def on(
        self,
        device_has_bytes: float | None,
        host_has_bytes: float | None,
        fixed_options: Sequence[str],
        leaner_options: Sequence[str] = (),
        given: Sequence[str] = ("device", "host"),
        *,
        drive: DriveUse = None,
    ) -> "InfeasiblePlan":
        """Return the refusal, of a machine with so much memory and a step cut as the user said."""
        return InfeasiblePlan(
            replace(
                self.shortage, device_has_bytes=device_has_bytes, host_has_bytes=host_has_bytes,
                fixed_options=tuple(fixed_options), leaner_options=tuple(leaner_options),
                given=tuple(given), drive=drive,
            )
        )  # fmt: skip

    def of_caps(self, given: Sequence[str]) -> "InfeasiblePlan":
        """Return the refusal, of which the user gave the caps of these memories alone."""
        return InfeasiblePlan(replace(self.shortage, given=tuple(given)))


def least_short(errors: Sequence[InfeasiblePlan]) -> InfeasiblePlan:
    """Combine refusals within the same caps: what would do by any of them.

    The task is where that takes its most.
    """
    shortages = [error.shortage for error in errors]
    device = min(filter(None, (s.enough_device_bytes for s in shortages)), default=None)
    host = min(filter(None, (s.enough_host_bytes for s in shortages)), default=None)
    last = shortages[-1]
    with_that = (s for s in shortages if s.cap == last.cap)
    least = min(with_that, key=lambda shortage: shortage.needed_bytes)
    return InfeasiblePlan(replace(least, enough_device_bytes=device, enough_host_bytes=host))


def _needed(shortage: Shortage) -> str:
    """What a rule's plan takes."""
    cap, missing = gib_text(shortage.cap_bytes), shortage.needed_bytes - shortage.cap_bytes
    if missing <= 0:  # no one cap is short: both are
        return f"policy '{shortage.policy}' does not fit {_caps(shortage)}"
    allowed = (
        f"{_flag(shortage)} {cap} allows"
        if shortage.cap in shortage.given
        else f"the {cap} there is"
    )
    return (
        f"policy '{shortage.policy}' needs {gib_text(shortage.needed_bytes)} of {shortage.cap} "
        f"memory at task '{shortage.task}', {missing:,} bytes ({gib_text(missing)}) more than "
        f"{allowed}"
    )


def _proven(shortage: Shortage) -> str:
    """What any plan takes at the least."""
    assert shortage.proven is not None
    least = [
        f"with this {other} memory it needs at least {gib(size)} of {memory} memory"
        for memory, other, size in zip(
            ("device", "host"), ("host", "device"), shortage.proven, strict=True
        )
        if size is not None
    ]
    told = ", or ".join(least)
    proof = f". {told[0].upper()}{told[1:]}, by the bound" if least else ""
    return f"The step does not fit {_caps(shortage)}{proof}; its largest task is '{shortage.task}'"


def _caps(shortage: Shortage) -> str:
    """Both memories, with the flags of those that were given."""
    parts = []
    for side in ("device", "host"):
        size = shortage.cap_bytes if side == shortage.cap else shortage.other_cap_bytes
        if size is not None:
            flag = f" (--{side}-mem)" if side in shortage.given else ""
            parts.append(f"{gib(size)} of {side} memory{flag}")
    return " and ".join(parts)


def _flag(shortage: Shortage) -> str:
    return "--device-mem" if shortage.cap == "device" else "--host-mem"


def _advice(shortage: Shortage) -> str:
    """Caps to type, or machines to have, that would do; ways to cut only where some are untried."""
    options, machines = [], []
    for side, least, has in (
        ("device", shortage.enough_device_bytes, shortage.device_has_bytes),
        ("host", shortage.enough_host_bytes, shortage.host_has_bytes),
    ):
        if least is None:
            continue
        if has is None or least <= has:
            options.append(f"--{side}-mem {as_cap(least)}")
        else:
            machines.append(
                f"a machine with {gib_text(least)} of {side} memory "
                f"(this one has {gib_text(round(has))})"
            )
    cut = ""
    if shortage.fixed_options:
        cut = (
            f" Without {' and '.join(shortage.fixed_options)} other ways to cut the step are tried."
        )
    if options or machines:
        what = "Tried, and fits" if shortage.less_may_do else "What would do"
        return f"{what}: {' or '.join([*options, *machines])}.{cut}"
    none = "is known to do" if shortage.less_may_do else "would do"
    return f"No larger cap on one side alone {none}: raise both.{cut}"


def _aside(shortage: Shortage) -> str:
    """Of much memory that other kernels may not take."""
    if shortage.cap != "device" or shortage.library_bytes < _MUCH * shortage.needed_bytes:
        return ""
    return (
        f" Of the device, {gib_text(shortage.library_bytes)} are for what attention's library "
        "allocates by itself while it runs; another (--attention) may take less."
    )


def _leaner(shortage: Shortage) -> str:
    told = ""
    if shortage.leaner_options:
        told = f" Less is needed with {' or '.join(shortage.leaner_options)}: `twinstream fit` "
        told += "compares them."
    host_cap = shortage.cap_bytes if shortage.cap == "host" else shortage.other_cap_bytes
    needed = None if shortage.proven is None else shortage.proven[1]
    more_host_helps = needed is not None and host_cap is not None and needed > host_cap
    if shortage.drive == "read":
        told += " Frozen weights may be read from a drive: --disk-mem 1TB, of a run --disk PATH."
    elif shortage.drive == "written" and more_host_helps:
        told += (
            " What the host has no room for may lie on a drive: --disk-mem 2TB --disk-bandwidth "
            "7GB/s,5GB/s, of a run --disk PATH."
        )
    return told


def gib_text(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.3f} GiB" if size_bytes >= 2**30 else gib(size_bytes)
