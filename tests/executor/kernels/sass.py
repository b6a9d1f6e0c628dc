"""What a warp executes of a kernel's main loop, counted in its SASS."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton

BIN = Path(triton.__file__).parent / "backends/nvidia/bin"
_LINE = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)([^;]*);", re.ASCII)
# Of sm_90, a multiprocessor a cycle: 128 lanes of float32, 64 of these, 16 of the last.
_FLOAT32 = {"FFMA", "FADD", "FMUL"}
_ELSEWHERE = {"LDG", "STG", "LDS", "STS", "LDC", "BAR", "SHFL", "BRA", "BSSY", "BSYNC", "EXIT"}
_SPECIAL = {"MUFU", "FCHK", "I2F", "F2I", "F2F"}


@dataclass(frozen=True)
class LoopCount:
    """Instructions of one turn of the loop, and of them those of the integer lanes."""

    issued: int
    integer: int


def disassembled(cubin: bytes, *options: str) -> str:
    """What cuobjdump prints of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(BIN / "cuobjdump"), *options, file.name]
        environment = {"PATH": f"{BIN}:/usr/bin:/bin"}  # it calls nvdisasm
        return subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment
        ).stdout


def loop_count(sass: str) -> LoopCount:
    """One turn of the longest loop, on the path that ordinary numbers take.

    A branch forward skips what is seldom: the slow paths of divisions and roots, which are calls,
    and what only few blocks do. So every branch forward is taken.
    """
    lines = [(int(at, 16), op, rest) for at, op, rest in _LINE.findall(sass)]
    place = {at: index for index, (at, _, _) in enumerate(lines)}
    jumps = [(at, int(re.findall(r"0x([0-9a-f]+)", rest)[-1], 16))
             for at, op, rest in lines if op == "BRA"]  # fmt: skip
    end, head = max(((at, to) for at, to in jumps if to < at), key=lambda jump: jump[0] - jump[1])
    targets, turn, index = dict(jumps), [], place[head]
    while not turn or turn[-1][0] != end:
        at, op, _ = lines[index]
        assert op != "CALL", f"the path at {at:#x} calls a subroutine"
        turn.append((at, op))
        index = place[targets[at]] if op == "BRA" and at != end else index + 1
    ops = [op for _, op in turn]
    others = _FLOAT32 | _ELSEWHERE | _SPECIAL
    integer = [op for op in ops if op not in others and not op.startswith(("IMAD", "U"))]
    return LoopCount(len(ops), len(integer))
