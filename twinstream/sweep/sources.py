"""What of twinstream's code a row depends on, as a hash."""

import hashlib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points, version
from importlib.resources import files
from importlib.resources.abc import Traversable

from twinstream.planner.policies import GROUP

PACKAGES = (
    "twinstream.hardware_profiles", "twinstream.models", "twinstream.planner",
    "twinstream.schedule", "twinstream.simulator", "twinstream.measures", "twinstream.clusters",
    "twinstream.cost",
)  # fmt: skip


@cache
def sources_hash() -> str:
    """Of all modules that plan, predict and sum up, and of the version of the solver (HiGHS).

    Comments count too: to tell them from code would take longer than it may save.
    """
    found = hashlib.sha256(version("highspy").encode())
    for name, file in sources():
        found.update(f"\n{name}\n".encode() + file.read_bytes())
    return found.hexdigest()


def sources() -> Iterator[tuple[str, Traversable]]:
    """Names and files, in the same order everywhere; registered policies are among them."""
    registered = {entry.module.rpartition(".")[0] for entry in entry_points(group=GROUP)}
    for package in sorted({*PACKAGES, *registered} - {""}):
        yield from _modules(package, files(package))
    yield "twinstream.sweep.cell", files("twinstream.sweep") / "cell.py"


def _modules(name: str, folder: Traversable) -> Iterator[tuple[str, Traversable]]:
    for one in sorted(folder.iterdir(), key=lambda one: one.name):
        if one.is_dir():
            yield from _modules(f"{name}.{one.name}", one)
        elif one.name.endswith(".py"):
            yield f"{name}.{one.name}", one
