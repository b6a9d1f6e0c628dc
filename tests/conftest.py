"""What holds for every test: golden files, one hypothesis profile, and the skip of GPU tests."""

import difflib
import importlib.util
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

GOLDEN = Path(__file__).parent / "golden"

# Before torch is imported: on two busy cores, torch threads in every worker wait for each other
# and the executor's tests take five times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Before Triton is imported: without an NVIDIA driver its kernels run in its interpreter.
if not any(Path(path).exists() for path in ("/dev/nvidiactl", "/proc/driver/nvidia")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# What a run measures of this CPU is kept for the next one, here for the tests of one process alone.
_cache = tempfile.TemporaryDirectory(prefix="twinstream-cache-")
os.environ["XDG_CACHE_HOME"] = _cache.name

settings.register_profile("twinstream", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("twinstream")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="Rewrite the golden files that differ; their tests fail once, so read the diff.",
    )


@pytest.fixture
def check_golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with a file in tests/golden, byte for byte."""
    update: bool = request.config.getoption("--update-golden")

    def check(name: str, actual: str) -> None:
        path = GOLDEN / name
        expected = path.read_bytes().decode() if path.exists() else None
        if actual == expected:
            return
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(actual.encode())
            pytest.fail(f"rewrote {path}: read its diff, then run again", pytrace=False)
        if expected is None:
            pytest.fail(f"{path} is missing: run with --update-golden", pytrace=False)
        diff = difflib.unified_diff(
            expected.splitlines(keepends=True), actual.splitlines(keepends=True), name, "actual"
        )
        pytest.fail(
            f"{name} differs (--update-golden rewrites it):\n{''.join(diff)}", pytrace=False
        )

    return check


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and (reason := _why_no_cuda()):
        pytest.skip(reason)


def _why_no_cuda() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "needs a CUDA device, and torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return f"needs a CUDA device, and torch {torch.__version__} sees none"
    return None
