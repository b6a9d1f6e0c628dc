"""What the explorer is asked, in the page's URL and in the controls."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from urllib.parse import parse_qs, urlencode

from twinstream.planner.request import DEFAULT_POLICY
from twinstream.schedule.errors import TwinstreamError

_LARGEST_COUNT = 2**40
_MOST_DIGITS = 13


class StateError(TwinstreamError):
    """A control or a part of the URL that cannot be used."""


@dataclass(frozen=True)
class State:
    """The controls as texts, as they are typed and as they stand in the URL; "" is not given."""

    model: str = "8b"
    machines: str = "h100"
    seq_len: str = "8192"
    tokens_per_step: str = "32768"
    device_mem: str = ""
    host_mem: str = ""
    policy: str = DEFAULT_POLICY
    effort: str = "quick"
    lora: str = ""
    optimizer_state: str = ""
    kernels: str = ""
    attention: str = ""

    def at_url(self, search: object) -> "State":
        """The state in a URL's query; what it lacks is as here, in a new page.

        Raises:
            StateError: it is no query.
        """
        if not isinstance(search, str | None):
            raise StateError("the URL's query is no text")
        given = parse_qs((search or "").removeprefix("?"), keep_blank_values=True)
        known = {field.name for field in fields(State)}
        return replace(self, **{name: v[-1] for name, v in given.items() if name in known})

    @property
    def url(self) -> str:
        return "?" + urlencode(vars(self))

    @property
    def machine_names(self) -> Sequence[str]:
        return [name for name in self.machines.split(",") if name]

    @property
    def refined(self) -> "State | None":
        """The same with the normal effort, where this asks for a quick plan of `optimal`."""
        quick = self.effort == "quick" and self.policy in ("", DEFAULT_POLICY)
        return replace(self, effort="normal") if quick else None

    def command(self, machine: str) -> str:
        """The `plan` command that gives the same figures."""
        options = {
            "model": self.model,
            "machine": machine,
            "seq-len": _as_typed(self.seq_len),
            "tokens-per-step": _as_typed(self.tokens_per_step),
            "device-mem": self.device_mem.strip(),
            "host-mem": self.host_mem.strip(),
            "policy": self.policy or DEFAULT_POLICY,
            "effort": self.effort if self.policy in ("", DEFAULT_POLICY) else "",
            "lora": self.lora.strip(),
            "optimizer-state": self.optimizer_state,
            "kernels": self.kernels,
            "attention": self.attention,
        }
        given = (f"--{name} {shlex.quote(value)}" for name, value in options.items() if value)
        return f"twinstream plan {' '.join(given)}"


def _as_typed(text: str) -> str:
    """A count as the command line reads it: there a comma parts lengths that are packed."""
    try:
        number = count_of(text, "")
    except StateError:
        return text.strip()
    return "" if number is None else str(number)


def count_of(text: str, name: str) -> int | None:
    """A positive whole number, or None where nothing is given.

    Raises:
        StateError: it is neither.
    """
    if not text.strip():
        return None
    digits = text.replace(",", "").replace("_", "").strip()
    number = int(digits) if digits.isdecimal() and len(digits) <= _MOST_DIGITS else 0
    if not 0 < number <= _LARGEST_COUNT:
        raise StateError(
            f"{name} needs a whole number from 1 to {_LARGEST_COUNT:,}, got '{text[:40]}'"
        )
    return number
