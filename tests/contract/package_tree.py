"""The package as it lies on disk, read without importing it."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

REPO = Path(__file__).parents[2]
FOLDERS = ("executor", "hardware_profiles", "models", "planner", "simulator")


@cache
def package_files() -> Mapping[Path, str]:
    """Every file of the package, with its path when installed (`twinstream/models/options.py`)."""
    files = {}
    for folder in ("twinstream", *FOLDERS):
        for path in sorted((REPO / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                inside = path.relative_to(REPO).as_posix()
                files[path] = inside if folder == "twinstream" else f"twinstream/{inside}"
    return files


@cache
def module_files() -> Mapping[str, Path]:
    """Every module by its full name, with its file."""
    return {
        _dotted(inside): path for path, inside in package_files().items() if path.suffix == ".py"
    }


def needs_torch(module: str) -> bool:
    """Whether importing a module may import torch."""
    return (module + ".").startswith("twinstream.executor.")


def _dotted(inside: str) -> str:
    return inside.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
