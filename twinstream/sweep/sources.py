"""What of twinstream's code a row depends on, as a hash."""

import hashlib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from importlib.resources.abc import Traversable

PACKAGES = (
    "twinstream.hardware_profiles", "twinstream.models", "twinstream.planner",
    "twinstream.planner.policies", "twinstream.schedule", "twinstream.simulator",
)  # fmt: skip
MODULES = ("api", "explanation", "metrics", "residence", "uncertainty")  # of the front door


@cache
def sources_hash() -> str:
    """Of all modules that plan, predict and sum up, and of the version of the solver (HiGHS).

    Comments count too: to tell them from code would take longer than it may save.
    """
    found = hashlib.sha256(version("highspy").encode())
    for name, file in _sources():
        found.update(f"\n{name}\n".encode() + file.read_bytes())
    return found.hexdigest()


def _sources() -> Iterator[tuple[str, Traversable]]:
    """Names and files, in the same order everywhere."""
    for package in PACKAGES:
        modules = (file for file in files(package).iterdir() if file.name.endswith(".py"))
        for file in sorted(modules, key=lambda file: file.name):
            yield f"{package}.{file.name}", file
    for module in MODULES:
        yield f"twinstream.{module}", files("twinstream") / f"{module}.py"
    yield "twinstream.sweep.cell", files("twinstream.sweep") / "cell.py"
