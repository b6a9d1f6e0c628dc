"""Every folder is a room: a purpose in one sentence, few files, and imports that point one way."""

import ast
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.contract.package_tree import REPO, module_files

MOST_FILES = 14  # "about a dozen", beside __init__.py
Arrows = dict[str, set[str]]


def rooms() -> dict[str, list[str]]:
    """By package, the modules that lie in it."""
    found: dict[str, list[str]] = defaultdict(list)
    for module, path in module_files().items():
        if path.name != "__init__.py":
            found[module.rpartition(".")[0]].append(module)
    return found


def arrows(package: str, modules: Mapping[str, Path]) -> Arrows:
    """Who imports whom among what lies in a package: its rooms, and its modules beside them."""
    found: Arrows = defaultdict(set)
    for module, path in modules.items():
        if not module.startswith(f"{package}."):
            continue
        one = module.removeprefix(f"{package}.").split(".")[0]
        for target in named_in(path) & modules.keys():
            if target.startswith(f"{package}."):
                other = target.removeprefix(f"{package}.").split(".")[0]
                found[one] |= {other} - {one}
    return found


@cache
def named_in(path: Path) -> frozenset[str]:
    """Modules, and names in them, that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def circle(found: Arrows) -> list[str]:
    """Names that reach each other, in order; none if all arrows point one way."""

    def walk(path: list[str]) -> list[str]:
        for after in sorted(found.get(path[-1], ())):
            if after in path:
                return [*path[path.index(after) :], after]
            if after not in done and (round_trip := walk([*path, after])):
                return round_trip
        done.add(path[-1])
        return []

    done: set[str] = set()
    return next(filter(None, (walk([name]) for name in sorted(found))), [])


@pytest.mark.parametrize("package", sorted(rooms()))
def test_a_room_says_its_purpose_in_one_sentence(package):
    path = module_files()[package]
    purpose = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert purpose, f"{path.relative_to(REPO)} lacks its sentence"
    assert purpose.splitlines()[0].endswith("."), purpose


@pytest.mark.parametrize(("package", "modules"), sorted(rooms().items()))
def test_a_room_has_about_a_dozen_files(package, modules):
    assert len(modules) <= MOST_FILES, modules


@pytest.mark.parametrize("package", sorted({m.rpartition(".")[0] for m in module_files()} - {""}))
def test_imports_within_a_package_make_no_circle(package):
    assert circle(arrows(package, module_files())) == []


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"a": {"b"}, "b": {"c"}}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, ["b", "c", "b"]),
        ({"a": {"b", "c"}, "b": {"c"}, "c": set()}, []),
    ],
)
def test_a_circle_is_found(found, expected):
    assert circle(found) == expected


def test_imports_in_functions_count(tmp_path):
    (tmp_path / "one.py").write_text("def f():\n    from p.room.two import x\n")
    (tmp_path / "two.py").write_text("import p.one\n")
    modules = {"p.one": tmp_path / "one.py", "p.room.two": tmp_path / "two.py"}
    assert circle(arrows("p", modules)) == ["one", "room", "one"]
