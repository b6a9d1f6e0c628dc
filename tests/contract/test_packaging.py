"""What is on disk is what is packaged: modules, data files and the type marker."""

import re
import shutil
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.contract.package_tree import FOLDERS, REPO, module_files, needs_torch, package_files
from tests.contract.run_python import run_python

PYPROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))
BUILD_WHEEL = "import setuptools.build_meta as b, sys; b.build_wheel(sys.argv[1])"
LOAD_FROM_WHEEL = """
import importlib, sys
wheel, *modules = sys.argv[1:]
sys.path.insert(0, wheel)
for name in modules:
    assert importlib.import_module(name).__file__.startswith(wheel), name
from twinstream.hardware_profiles.loader import load_machine, machine_names
from twinstream.models.presets import load_preset, preset_names
print(*[load_machine(name).name for name in machine_names()])
print(*[name for name in preset_names() if load_preset(name)])
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built offline from a copy so that the checkout stays clean, and unpacked."""
    copy, built, unpacked = (tmp_path_factory.mktemp(name) for name in ("copy", "built", "wheel"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, copy)
    for folder in ("twinstream", *FOLDERS):
        shutil.copytree(REPO / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    run_python("-c", BUILD_WHEEL, built, cwd=copy)
    (archive,) = built.glob("*.whl")
    zipfile.ZipFile(archive).extractall(unpacked)
    return unpacked


def test_the_listed_packages_are_the_folders_on_disk():
    on_disk = {str(Path(inside).parent) for inside in package_files().values() if ".py" in inside}
    listed = PYPROJECT["tool"]["setuptools"]["packages"]
    assert set(listed) == {folder.replace("/", ".") for folder in on_disk}


def test_every_package_is_a_regular_one():
    files = package_files()
    packages = {path.parent for path in files if path.suffix == ".py"}
    assert [str(folder) for folder in packages if folder / "__init__.py" not in files] == []


def test_every_data_file_matches_a_package_data_pattern():
    setuptools = PYPROJECT["tool"]["setuptools"]
    shipped = {
        path
        for package, patterns in setuptools["package-data"].items()
        for pattern in patterns
        for path in (REPO / setuptools["package-dir"][package]).glob(pattern)
    }
    on_disk = {path for path in package_files() if path.suffix != ".py"}
    assert on_disk == shipped
    assert REPO / "twinstream/py.typed" in shipped


def test_the_wheel_holds_exactly_the_files_on_disk(wheel):
    packed = {path.relative_to(wheel).as_posix() for path in wheel.rglob("*") if path.is_file()}
    modules_and_data = {name for name in packed if ".dist-info/" not in name}
    assert sorted(modules_and_data ^ set(package_files().values())) == []


def test_the_wheel_works_without_the_checkout(wheel, tmp_path):
    modules = [module for module in module_files() if not needs_torch(module)]
    machines, presets = run_python(
        "-c", LOAD_FROM_WHEEL, wheel, *modules, cwd=tmp_path
    ).splitlines()
    assert machines.split() == sorted(p.stem for p in REPO.glob("hardware_profiles/data/*.toml"))
    files = REPO.glob("models/presets/*.toml")
    tables = [name for file in files for name in tomllib.loads(file.read_text(encoding="utf-8"))]
    assert presets.split() == sorted(tables)


def test_every_direct_requirement_is_pinned_within_its_range():
    project = PYPROJECT["project"]
    wanted = [*PYPROJECT["build-system"]["requires"], *project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        wanted += extra
    lines = (REPO / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {
        canonicalize_name(pin.name): pin.specifier
        for pin in (Requirement(line) for line in lines if not line.startswith("#"))
    }
    for requirement in map(Requirement, wanted):
        (pin,) = pins[canonicalize_name(requirement.name)]
        assert pin.operator == "=="
        assert requirement.specifier.contains(pin.version), f"{requirement} is pinned to {pin}"


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_the_demo_installs_what_runs_need_and_tests_add_to_that():
    """By what make would do in a fresh checkout."""

    def installed_by(target: str) -> list[str]:
        command = ["make", "--dry-run", "--always-make", target]
        lines = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout
        return re.findall(r"grep '\^(\w+)==|--editable '\.\[([\w,]+)\]'", lines)

    demo = installed_by("demo")
    assert demo == [("torch", ""), ("setuptools", ""), ("", "executor")]
    assert installed_by("test") == [*demo, ("", "executor,dev")]
