"""The calls of benchmarks/gpu/README.md, here: a bare Python, shipped wheels, tiny models, a CPU.

    make wheels WHEELS_PYTHON=3.11    # of the Python that runs this
    python -m benchmarks.gpu.lent.dry_run [--keep FOLDER]

The Python sees the packages that a lent machine's image has (lent_packages.txt) and nothing else;
what it does not find here either (JAX, CuPy, ...) nobody needs. $OUT is emptied before every call,
as there, and the last call is as on a machine that was given back in between.
"""

import argparse
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

REPO = Path(__file__).resolve().parents[3]
LIST = Path(__file__).parent / "lent_packages.txt"
_SMALL = "--backend cpu --size tiny --jobs 1"
_CALL = (
    "benchmarks/gpu/lent/lent_machine.sh python3 -m benchmarks.gpu.lent.call "
    "--folder $BASE/campaign --to $OUT --left-s"
)


def bare_python(folder: Path) -> Path:
    """The bin folder of an environment with the lent machine's packages that are here too."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    lent = {normal(name) for name in LIST.read_text(encoding="utf-8").splitlines()}
    for found in importlib.metadata.distributions():
        if normal(found.metadata["Name"]) not in lent:
            continue
        tops = {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "bin")}
        for top in tops - {"__pycache__"}:
            source, link = Path(str(found.locate_file(top))), site / top
            if source.exists() and not link.exists():
                link.symlink_to(source)
    return folder / "bin"


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def checkout(folder: Path) -> None:
    """What a call sends: tracked and untracked files that git does not ignore."""
    command = ("git", "-C", str(REPO), "ls-files", "-co", "--exclude-standard", "-z")
    for name in (
        subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
    ):
        if name and (REPO / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, folder / name)


class Lent:
    """A lent machine of this machine: a checkout, a bare Python, a /tmp and an $OUT of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0
        self.repo, self.out = folder / "repo", folder / "out"
        bin_folder = bare_python(folder / "bare")
        self.env = {
            "PATH": f"{bin_folder}:/usr/local/bin:/usr/bin:/bin", "HOME": str(folder),
            "OUT": str(self.out), "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8",
        }  # fmt: skip
        checkout(self.repo)
        self.give_back()

    def give_back(self) -> None:
        """The next call finds a machine that has nothing of the last."""
        self.number += 1
        base = self.folder / f"machine-{self.number}"
        base.mkdir()
        self.env |= {"TWINSTREAM_LENT": str(base), "BASE": str(base), "TMPDIR": str(base)}

    def run(self, command: str, carry: tuple[str, ...]) -> str:
        """One call, its output printed; what it needs of ignored files is copied for it alone."""
        for name in (".whl", ".carry"):
            shutil.rmtree(self.repo / name, ignore_errors=True)
        for name in carry:
            kept = name == ".carry/campaign"
            shutil.copytree(self.folder / "kept" if kept else REPO / name, self.repo / name)
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir()
        size = sum(p.stat().st_size for p in self.repo.rglob("*") if p.is_file()) / 2**20
        print(f"\n$ {command}   # carry {', '.join(carry)}: {size:.1f} MiB travel", flush=True)
        assert len(command) <= 2000 and size < 64
        start_s = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.repo, env=self.env, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        print(done.stdout, flush=True)
        print(f"# exit code {done.returncode} after {time.monotonic() - start_s:.0f} s", flush=True)
        assert done.returncode == 0
        shutil.rmtree(self.folder / "kept", ignore_errors=True)
        shutil.copytree(self.out, self.folder / "kept")
        return done.stdout


def dry_run(folder: Path) -> None:
    """The calls, one after the other."""
    lent = Lent(folder)
    absent = (
        "import importlib.util as u; print([n for n in ('pydantic', 'simpy', 'highspy', 'ray', "
        "'mypy', 'flash_attn', 'dash') if not u.find_spec(n)])"
    )
    told = subprocess.run(["python3", "-c", absent], env=lent.env, text=True, check=True,
                          capture_output=True).stdout  # fmt: skip
    print(f"the bare Python lacks {told.strip()}", flush=True)
    assert "pydantic" in told and "simpy" in told
    flash4 = (REPO / ".carry/flash4-1").is_dir()
    first = (".whl", *((".carry/flash4-1",) if flash4 else ()))
    cudnn = (".carry/cudnn",) if (REPO / ".carry/cudnn").is_dir() else ()
    second = (*cudnn, *((".carry/flash4-2",) if flash4 else ()), ".carry/campaign")
    again = (".whl", *cudnn, ".carry/campaign")
    lent.run(f"{_CALL} 1800 --stage facts {_SMALL}", first)
    command = f"{_CALL} 230 --timeout-s 40 --earlier $PWD/.carry/campaign {_SMALL}"
    told = lent.run(command, second)
    assert "the campaign runs on" in told
    lent.run(command, again)
    lent.give_back()
    told = lent.run(f"{_CALL} 900 --earlier $PWD/.carry/campaign {_SMALL}", again)
    assert "the campaign has ended" in told and "## Cells" in told
    print("files that came back:", *sorted(p.name for p in lent.out.iterdir()))


def main() -> None:
    """Run it in a temporary folder, or in one that is kept."""
    parser = argparse.ArgumentParser(description="the campaign's calls on a lent machine, here")
    parser.add_argument("--keep", type=Path, help="an empty folder, kept")
    keep = parser.parse_args().keep
    if not any((REPO / ".whl").glob(f"*cp{sys.version_info[0]}{sys.version_info[1]}*.whl")):
        version = ".".join(map(str, sys.version_info[:2]))
        raise SystemExit(f"no wheels for this Python: make wheels WHEELS_PYTHON={version}")
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        dry_run(keep.resolve())
        return
    with tempfile.TemporaryDirectory() as folder:
        dry_run(Path(folder))


if __name__ == "__main__":
    os.chdir(REPO)
    main()
