"""Which libraries are installed, from their metadata: nothing is imported."""

import re
from importlib.metadata import PackageNotFoundError, version


def missing_distribution(name: str, install: str, least: tuple[int, ...] = ()) -> str | None:
    """Why a library cannot be used and what to do, or None where it is new enough."""
    try:
        found = version(name)
    except PackageNotFoundError:
        return f"{name} is not installed ({install})"
    if least and _numbers(found) < least:
        needed = ".".join(str(number) for number in least)
        return f"{name} is {found}, and {needed} or newer is needed ({install})"
    return None


def _numbers(text: str) -> tuple[int, ...]:
    """The release of a version: 2.7.4.post1 is (2, 7, 4)."""
    release = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in release.group().split(".")) if release else ()
