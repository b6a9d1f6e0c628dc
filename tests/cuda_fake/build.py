"""Build the fake CUDA libraries for the torch of a virtual environment."""

import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

SOURCES = Path(__file__).with_name("src")
CUDA = Path("/usr/local/cuda-13.0/include")
"""Of nvcc: the wheels lack its `crt` folder."""
# By library: its sources, the symbols that it exports, and more options.
LIBRARIES = {
    "libcudart.so.13": (
        "device.cpp runtime.cpp stubs_runtime.cpp", "cuda*; __cuda*; fake_*; _ZN4fake*", "",
    ),
    "libcuda.so.1": ("driver.cpp stubs_driver.cpp", "cu*; fake_*", ""),
    "libcublasLt.so.13": (
        "matmul.cpp stubs_cublasLt.cpp", "cublasLt*; fake_cuda_product", "-O3 -mavx2 -mfma",
    ),
    "libcublas.so.13": ("cublas.cpp stubs_cublas.cpp", "cublas[A-KM-Z]*", ""),
}  # fmt: skip
_LINKED = {"libcublas.so.13": ["libcublasLt.so.13"]}


class BuildError(Exception):
    """A compiler or a header is missing."""


def build(venv: Path, into: Path) -> None:
    """Write the libraries into a folder.

    Raises:
        BuildError: they cannot be built.
    """
    packages = next((venv / "lib").glob("python3.*/site-packages"))
    includes = [packages / "nvidia/cu13/include", CUDA]
    for header in (includes[0] / "cublas_v2.h", CUDA / "crt/host_defines.h"):
        if not header.exists():
            raise BuildError(
                f"{header} is missing: the wheels of torch for CUDA 13 and nvcc's headers"
            )
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        _write_stubs(made, includes, _undefined(packages / "torch/lib"))
        for name in LIBRARIES:
            _link(name, into, made, includes)
        _run(["gcc", "-O2", "-fPIC", "-shared", "-w", "-Wl,-soname,libnvidia-ml.so.1",
              "-o", str(into / "libnvidia-ml.so.1"), str(SOURCES / "nvml.c")])  # fmt: skip


def _link(name: str, into: Path, made: Path, includes: Iterable[Path]) -> None:
    sources, exported, options = LIBRARIES[name]
    version_script = made / f"{name}.map"
    # libcuda's symbols have no version
    version = "" if name == "libcuda.so.1" else name
    version_script.write_text(f"{version} {{ global: {exported}; local: *; }};\n")
    paths = [(SOURCES if (SOURCES / one).exists() else made) / one for one in sources.split()]
    runtime = [] if name == "libcudart.so.13" else ["libcudart.so.13"]
    linked = [into / one for one in [*_LINKED.get(name, []), *runtime]]
    _run([
        "g++", "-std=c++17", "-O2", *options.split(), "-fPIC", "-shared", "-w",
        *(f"-I{path}" for path in [*includes, made, SOURCES]),
        f"-Wl,-soname,{name}", f"-Wl,--version-script={version_script}", "-o", str(into / name),
        *map(str, [*paths, *linked]), "-ldl", "-lpthread",
    ])  # fmt: skip


def _write_stubs(made: Path, includes: Iterable[Path], undefined: set[str]) -> None:
    """Weak functions for whatever is not there: they say their name once, and refuse."""
    declared = {
        "runtime": (_declared("cuda_runtime_api.h", includes, "cudaError_t", "cuda[A-Z]"), 801),
        "driver": (_declared("cuda.h", includes, "CUresult", "cu[A-Z]"), 801),
        "cublasLt": ({name for name in undefined if name.startswith("cublasLt")}, 15),
        "cublas": ({name for name in undefined if re.match("cublas[A-KM-Z]", name)}, 15),
    }
    for library, (names, error) in declared.items():
        lines = ['extern "C" void fake_missing(const char*);', 'extern "C" {']
        for name in sorted(names):
            lines.append(
                f"__attribute__((weak)) int {name}(...) "
                f'{{ fake_missing("{name}"); return {error}; }}'
            )
        (made / f"stubs_{library}.cpp").write_text("\n".join([*lines, "}"]) + "\n")
    header = next(path / "cuda.h" for path in includes if (path / "cuda.h").exists()).read_text()
    newest = re.findall(
        r"^#\s*define\s+(cu[A-Z]\w+)\s+(?:__CUDA_API_PTDS|__CUDA_API_PTSZ)?\(?(cu\w+_v\d+)\)?",
        header, re.MULTILINE,
    )  # fmt: skip
    names = "".join(
        f'{{"{plain}", "{version}"}},\n' for plain, version in sorted(dict(newest).items())
    )
    (made / "driver_names.inc").write_text(names)


def _declared(header: str, includes: Iterable[Path], result: str, prefix: str) -> set[str]:
    options = [f"-I{path}" for path in includes]
    text = _run(["gcc", "-E", "-P", *options, "-include", header, "-x", "c", "/dev/null"])
    text = re.sub(r"__attribute__\s*\(\((?:[^()]|\([^()]*\))*\)\)", "", text).replace("\n", " ")
    return set(
        re.findall(rf"(?:extern\s+)?{result}\s+({prefix}[A-Za-z0-9_]+)\s*\([^;{{}}]*?\)\s*;", text)
    )


def _undefined(libraries: Path) -> set[str]:
    """What torch's libraries want of others."""
    lines = _run(["nm", "-D", "--undefined-only", str(libraries / "libtorch_cuda.so")])
    lines += _run(["nm", "-D", "--undefined-only", str(libraries / "libtorch_cuda_linalg.so")])
    return {line.split()[-1].partition("@")[0] for line in lines.splitlines() if line.strip()}


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise BuildError(f"{command[0]} is missing: install gcc, g++ and binutils") from None
    if done.returncode:
        raise BuildError(f"{' '.join(command[:1])} failed:\n{done.stderr[-3000:]}")
    return done.stdout
