"""The options that commands share, and what they amount to together."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from twinstream import api
from twinstream.planner.plan import policies
from twinstream.schedule.files import DocumentError
from twinstream.schedule.sizes import SizeError

_PLAN = "What to plan"
_LIMITS = "Limits"
_LARGEST_SEED = 2**31 - 1
_LONGEST_SIZE = 40


def _check_output(path: Path | None) -> Path | None:
    """Refuse a place that cannot be written before the work, not after it."""
    if path is None:
        return None
    if path.exists() and not path.is_file():
        raise DocumentError(f"cannot write {path}: it is not a file; name a file")
    if not path.parent.is_dir():
        raise DocumentError(f"cannot write {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise DocumentError(f"cannot write {path}: permission denied")
    return path


def _check_size(text: str | None) -> str | None:
    """Refuse numbers too long to be a size."""
    if text is not None and len(text) > _LONGEST_SIZE:
        raise SizeError(f"'{text[:_LONGEST_SIZE]}...' is no size; write it as 24GiB, 80% or bytes")
    return text


def output(what: str) -> typer.models.OptionInfo:
    """`-o FILE`, checked before the command starts."""
    option: typer.models.OptionInfo = typer.Option(
        "--output", "-o", metavar="FILE", help=what, callback=_check_output
    )
    return option


_MODEL = typer.Option(
    "--model",
    metavar="NAME|FILE",
    help="A preset (`twinstream models`), or a Hugging Face config.json.",
    rich_help_panel=_PLAN,
)
_MACHINE = typer.Option(
    "--machine",
    metavar="NAME|FILE",
    help="A shipped profile (`twinstream machines`), or a TOML file.",
    rich_help_panel=_PLAN,
)
_SEQ_LEN = typer.Option(
    "--seq-len", min=1, metavar="N", help="Tokens of a sequence.", rich_help_panel=_PLAN
)

Model = Annotated[str, _MODEL]
Machine = Annotated[str, _MACHINE]
SeqLen = Annotated[int, _SEQ_LEN]
ModelIfPlanned = Annotated[str | None, _MODEL]
SeqLenIfPlanned = Annotated[int | None, _SEQ_LEN]
MachineIfKnown = Annotated[
    str | None,
    typer.Option(
        "--machine",
        metavar="NAME|FILE",
        help="By default the machine that the schedule was planned for, if it is a shipped one.",
    ),
]
TokensPerStep = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Tokens of an optimizer step; by default one round.",
        rich_help_panel=_PLAN,
    ),
]
ChunkTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Tokens of a chunk: packed sequences or a slice.",
        rich_help_panel=_PLAN,
    ),
]
ChunksPerRound = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Chunks of a round of gradient accumulation.",
        rich_help_panel=_PLAN,
    ),
]
DeviceMem = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        callback=_check_size,
        help="Cap of device memory: 24GiB, 80% or bytes; by default all.",
        rich_help_panel=_LIMITS,
    ),
]
HostMem = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        callback=_check_size,
        help="Cap of pinned host memory: 75GiB, 80% or bytes; by default all.",
        rich_help_panel=_LIMITS,
    ),
]
_POLICY = typer.Option(
    "--policy",
    metavar="NAME",
    help=f"One of: {', '.join(policies())}; by default {api.DEFAULT_POLICY}.",
    rich_help_panel=_LIMITS,
)
Policy = Annotated[str | None, _POLICY]

Backend = Annotated[
    str, typer.Option(metavar="NAME", help="auto (CUDA where there is one), cpu or cuda.")
]
Steps = Annotated[int, typer.Option(min=1, metavar="N", help="Training steps; the first is cold.")]
LearningRate = Annotated[float, typer.Option(min=0.0, max=1e3, metavar="X", help="Of AdamW.")]
Seed = Annotated[
    int, typer.Option(min=0, max=_LARGEST_SEED, metavar="N", help="Seed of the initial weights.")
]
Poison = Annotated[
    bool, typer.Option("--poison", help="Fill dead bytes with NaN, to expose a faulty schedule.")
]
Text = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Text to train on; by default Python's help topics."),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="A Hugging Face tokenizer.json; by default each byte is a token."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]


@dataclass(frozen=True)
class PlanOptions:
    """The options that say what to plan; None where one is not given."""

    model: str | None
    machine: str | None
    seq_len: int | None
    tokens_per_step: int | None
    chunk_tokens: int | None
    chunks_per_round: int | None
    device_mem: str | None
    host_mem: str | None
    policy: str | None

    def given(self) -> list[str]:
        """The flags that are set, but for --machine."""
        names = [name for name, value in vars(self).items() if value is not None]
        return [f"--{name.replace('_', '-')}" for name in names if name != "machine"]
