"""Machines in TOML: reading them, by name or path, with inheritance; and writing them."""

from pathlib import Path
from typing import Any

from twinstream.hardware_profiles.errors import ProfileError
from twinstream.hardware_profiles.link import D2H, DUPLEX, H2D, duplex_that_follows
from twinstream.hardware_profiles.memory_list import with_listed_memories
from twinstream.hardware_profiles.overrides import changed, override
from twinstream.hardware_profiles.profile_files import (
    MACHINES_FOLDER,
    ProfileLoader,
    profile_toml,
    shipped_names,
)
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.files import write_text

__all__ = ["load_machine", "load_machine_text", "machine_names", "override", "save_machine"]


def machine_names() -> tuple[str, ...]:
    """Names of the shipped machines, sorted."""
    return shipped_names(MACHINES_FOLDER)


def load_machine(name_or_path: str | Path | Machine) -> Machine:
    """The machine of a shipped profile (`h100`) or of a TOML file; a machine is itself.

    Raises:
        ProfileError: there is no such profile, or its content is wrong.
    """
    return _MACHINES.load(name_or_path)


def load_machine_text(text: str, source: str = "profile", directory: Path = Path()) -> Machine:
    """The machine of a TOML text.

    Args:
        source: what error messages call the text; a machine without `name` is called so too.
        directory: where a relative `base` path starts.
    """
    return _MACHINES.load_text(text, source, directory)


def save_machine(machine: Machine, path: str | Path) -> None:
    """Write a profile that loads back equal; numbers it inherited are written out.

    Raises:
        DocumentError: the file cannot be written.
    """
    write_text(profile_toml(machine), path)


def _made(document: dict[str, Any], base: Machine | None, source: str, _: Path) -> Machine:
    document = with_listed_memories(document, source)
    machine = changed(Machine, document, base, source)
    if base is not None and DUPLEX not in document:
        _require_duplex(machine, base, source)
    return machine


def _require_duplex(machine: Machine, base: Machine, where: str) -> None:
    """Refuse another link than the base's with the base's rate of both directions together."""
    now, before = machine.link_rates(), base.link_rates()
    ways = [way for way in (H2D, D2H) if now.get(way) != before.get(way)]
    if not ways or before.get(DUPLEX) is None:
        return
    line = "the rate of both directions together"
    if len(before) == 3:
        line = f"{duplex_that_follows(before, now[H2D], now[D2H]):g}"
    verb = "changes" if len(ways) == 1 else "change"
    raise ProfileError(
        f"{where}: {', '.join(ways)} {verb}, and {DUPLEX} would stay that of '{base.name}', "
        f"{before[DUPLEX]:g}: both directions together would be as fast as before. Add the line "
        f"{DUPLEX} = {line}"
    )


_OR_PROBE = ", or measure this machine with `twinstream probe`."
_MACHINES = ProfileLoader("machine", Machine, MACHINES_FOLDER, _made, _OR_PROBE)
