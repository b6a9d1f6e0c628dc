"""The script that a lent machine's calls begin with: wheels in parts, and the paths they need."""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[4]
SCRIPT = "benchmarks/gpu/lent/lent_machine.sh"
LARGE = "nvidia_cutlass_dsl_libs_cu13-1.0-py3-none-any.whl"


class Machine:
    """A lent machine's /tmp, and a checkout there with a script and hardly more."""

    def __init__(self, folder: Path) -> None:
        self.repo, self.base = folder / "repo", folder / "tmp"
        for name in ("twinstream", "executor", "hardware_profiles", "models", "planner",
                     "simulator", "benchmarks/gpu/lent", "tests", "docs"):  # fmt: skip
            (self.repo / name).mkdir(parents=True)
            (self.repo / name / "__init__.py").touch()
        (self.repo / "pyproject.toml").touch()
        shutil.copy(REPO / SCRIPT, self.repo / SCRIPT)
        self.base.mkdir()

    def run(self, program: str) -> subprocess.CompletedProcess[str]:
        env = {
            **os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "TWINSTREAM_LENT": str(self.base), "PYTHONPATH": "",
        }  # fmt: skip
        return subprocess.run(
            ["bash", SCRIPT, "python3", "-c", program], cwd=self.repo, env=env, text=True,
            capture_output=True, timeout=200, check=False,
        )  # fmt: skip


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


def wheel(path: Path, files: dict[str, str]) -> None:
    name, version = path.name.split("-")[:2]
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, content in files.items():
            archive.writestr(inside, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", tags)
        archive.writestr(f"{info}/RECORD", "")


def carried(repo: Path) -> tuple[bytes, Path]:
    """The first call's folder, with half of the large wheel; what the second is to carry."""
    first = repo / ".carry/flash4-1"
    first.mkdir(parents=True)
    wheel(first / "flash_attn_4-1.0-py3-none-any.whl", {"flash_attn/__init__.py": ""})
    wheel(first / LARGE, {"nvidia_cutlass_dsl/dsl_packages/cutlass/__init__.py": "found = 7\n"})
    sums = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}" for p in first.iterdir()]
    whole = (first / LARGE).read_bytes()
    (first / LARGE).unlink()
    (first / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    (first / f"{LARGE}.part-aa").write_bytes(whole[:100])
    return whole[100:], first


CUTLASS = (
    "import cutlass, os; print(cutlass.found, "
    "os.environ['FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED'], os.getcwd())"
)


def test_a_wheel_in_two_calls_is_put_together_and_found(machine):
    rest, first = carried(machine.repo)
    done = machine.run("import flash_attn")
    assert done.returncode != 0 and "No module named 'flash_attn'" in done.stderr
    assert "flash-attn 4 is not whole yet" in done.stderr
    shutil.rmtree(first)  # a carried folder replaces itself
    second = machine.repo / ".carry/flash4-2"
    second.mkdir()
    (second / f"{LARGE}.part-ab").write_bytes(rest)
    done = machine.run(CUTLASS)
    assert done.stdout.split()[:2] == ["7", "1"], done.stderr
    assert done.stdout.split()[2].startswith(str(machine.base)), "not in the checkout"
    shutil.rmtree(second)
    assert machine.run(CUTLASS).stdout.startswith("7 1"), "installed once, for all calls"


def test_a_changed_checkout_is_another_tree_beside_the_one_in_use(machine):
    program = (
        "import os, benchmarks.gpu.lent, twinstream; "
        "print(os.getcwd(), getattr(twinstream, 'new', 0))"
    )
    first = machine.run(program).stdout.split()
    assert machine.run(program).stdout.split() == first
    (machine.repo / "twinstream/__init__.py").write_text("new = 1\n")
    second = machine.run(program).stdout.split()
    assert (first[1], second[1]) == ("0", "1")
    assert Path(first[0]).is_dir() and first[0] != second[0]


def test_flash_attention_4_imports_from_the_wheels_that_are_shipped(machine):
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    parts = [REPO / ".carry/flash4-1", REPO / ".carry/flash4-2"]
    if not all(part.is_dir() and any(part.glob(f"*{tag}*")) for part in parts):
        pytest.skip(f"no wheels for {tag}: make wheels WHEELS_PYTHON={tag[2]}.{tag[3:]}")
    lent = REPO / ".carry/lent"
    if find_spec("cuda") is None and not lent.is_dir():
        pytest.skip(
            "the image has cuda-bindings, this machine not: pip install --target .carry/lent "
            "cuda-bindings einops"
        )
    for part in parts:
        shutil.copytree(part, machine.repo / ".carry" / part.name)
    program = (
        f"import sys; sys.path.append({str(lent)!r})",
        "import flash_attn.cute.interface as f",
        "print(callable(f._flash_attn_fwd), callable(f._flash_attn_bwd))",
    )
    done = machine.run("\n".join(program))
    assert done.stdout.split() == ["True", "True"], done.stderr[-2000:]
