"""Runs the README's commands again and puts their output under them.

twinstream probe --backend cpu -o cpu.toml && python -m benchmarks.readme    # all of them
python -m benchmarks.readme validate    # those with this word in them

A command is a line `$ ...` in a block marked `console`, with the lines that backslashes join to
it; what follows, up to the next command or the end of the block, is its output. Where an output
has a line `...`, as many lines before and after it are shown as were there before.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from twinstream.schedule.files import write_text

README = Path(__file__).parents[1] / "README.md"
_BLOCK = re.compile(r"(?<=^```console\n).*?(?=^```$)", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(r"^\$ (?:.*\\\n)*.*\n", re.MULTILINE)
_LEFT_OUT = "...\n"


def refreshed(block: str) -> str:
    """The block with every command's output as it is now."""
    commands, outputs = _COMMAND.findall(block), _COMMAND.split(block)[1:]
    pairs = zip(commands, outputs, strict=True)
    return "".join(
        command + (_shortened(_output(command[2:]), before) if _is_asked(command) else before)
        for command, before in pairs
    )


def _is_asked(command: str) -> bool:
    words = sys.argv[1:]
    return not words or any(word in command.split() for word in words)


def _output(command: str) -> str:
    done = subprocess.run(
        command, shell=True, cwd=README.parent, check=True, text=True,
        stdout=subprocess.PIPE, env=os.environ | {"COLUMNS": "100"},
    )  # fmt: skip
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.strip("\n").splitlines())


def _shortened(output: str, before: str) -> str:
    if _LEFT_OUT not in before:
        return output
    head, tail = before.split(_LEFT_OUT)
    lines = output.splitlines(keepends=True)
    return "".join([*lines[: head.count("\n")], _LEFT_OUT, *lines[-tail.count("\n") or None :]])


if __name__ == "__main__":
    readme = README.read_text(encoding="utf-8")
    write_text(_BLOCK.sub(lambda block: refreshed(block[0]), readme), README)
