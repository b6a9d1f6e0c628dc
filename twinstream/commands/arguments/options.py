"""The options that commands share, and what they amount to together."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Annotated

import typer

from twinstream import api
from twinstream.measures.policies_compared import ALL
from twinstream.models.demand.attention_limits import attention_names
from twinstream.planner.step_plan import policy_names
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import DocumentError
from twinstream.schedule.sizes import SizeError


class FixedKernelsError(TwinstreamError):
    """A policy that does not leave its kernels open, and --attention or --kernels."""


class ShareError(TwinstreamError):
    """A share that cannot be read."""


class LengthsError(TwinstreamError):
    """Lengths of sequences that cannot be read."""


_PLAN = "What to plan"
_LIMITS = "Limits"
_LARGEST_SEED = 2**31 - 1
_LONGEST_SIZE = 40
_MOST_LENGTHS = 4096
_OUTPUTS = {"output": "-o", "html": "--html"}
_LENGTH = re.compile("[1-9][0-9]{0,8}")


def check_output(path: Path | None) -> Path | None:
    """Refuse a place that cannot be written before the work, not after it."""
    if path is None:
        return None
    check_folder(path)
    try:
        path.exists()
    except OSError as error:
        raise DocumentError(f"cannot write {path}: {error.strerror}") from None
    if path.exists() and not path.is_file():
        raise DocumentError(f"cannot write {path}: it is not a file; name a file")
    if not path.parent.is_dir():
        raise DocumentError(f"cannot write {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise DocumentError(f"cannot write {path}: permission denied")
    return path


def check_folder(path: Path | None) -> Path | None:
    """Refuse `-`, which other programs take for standard output."""
    if path is not None and str(path) == "-":
        raise DocumentError(
            "cannot write -: standard output has the tables, or with --json the figures; name a "
            "place on the disk"
        )
    return path


def require_own_outputs(given: Mapping[str, object]) -> None:
    """Refuse to write over what a command reads, or twice to one file.

    Args:
        given: the command's parameters.

    Raises:
        DocumentError: says which file.
    """
    read = list(_flat(value for name, value in given.items() if name not in _OUTPUTS))
    written: list[Path] = []
    for name, flag in _OUTPUTS.items():
        path = given.get(name)
        if not isinstance(path, Path):
            continue
        if any(isinstance(one, str | Path) and _is_file_at(path, one) for one in read):
            raise DocumentError(
                f"cannot write {path}: the command reads it, and what is in it would be lost; name "
                f"another file with {flag}"
            )
        if any(one.resolve() == path.resolve() for one in written):
            raise DocumentError(f"cannot write {path} twice; name another file with {flag}")
        written.append(path)


def _is_file_at(path: Path, other: str | Path) -> bool:
    """Whether the other names the same file; most texts name none."""
    try:
        return path.samefile(other)
    except (OSError, ValueError):
        return False


def _flat(values: Iterable[object]) -> Iterator[object]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def _check_size(text: str | None) -> str | None:
    """Refuse numbers too long to be a size."""
    if text is not None and len(text) > _LONGEST_SIZE:
        raise SizeError(f"'{text[:_LONGEST_SIZE]}...' is no size; write it as 24GiB, 80% or bytes")
    return text


def _check_share(text: str | None) -> str | None:
    """Refuse what is no share before the work."""
    if text is not None:
        share_of(text)
    return text


def share_of(text: str) -> float:
    """
    >>> share_of("1%"), share_of("0.01")
    (0.01, 0.01)
    """
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        number = nan
    if not 0.0 < number < 1.0:
        raise ShareError(
            f"--optimizer-overhead '{text}' is no share between 0 and 1; write it as 1% or 0.01"
        )
    return number


def _check_lengths(text: str | None) -> str | None:
    """Refuse what is no length before the work."""
    if text is not None:
        lengths_of(text)
    return text


def lengths_of(text: str) -> tuple[int, ...]:
    """
    >>> lengths_of("8192"), lengths_of("300,212,512")
    ((8192,), (300, 212, 512))
    """
    parts = text.split(",")
    if len(parts) > _MOST_LENGTHS or not all(_LENGTH.fullmatch(part) for part in parts):
        raise LengthsError(
            f"--seq-len '{text[:_LONGEST_SIZE]}' is no length of sequences: give tokens from 1 to "
            f"999999999, or the lengths of up to {_MOST_LENGTHS} packed sequences as 300,212,512"
        )
    return tuple(int(part) for part in parts)


def output(what: str) -> typer.models.OptionInfo:
    """`-o FILE`, checked before the command starts."""
    option: typer.models.OptionInfo = typer.Option(
        "--output", "-o", metavar="FILE", help=what, callback=check_output
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
    "--seq-len",
    metavar="N[,N...]",
    callback=_check_lengths,
    help="Tokens of a sequence, or of unequal ones that are packed together: 300,212,512.",
    rich_help_panel=_PLAN,
)

Model = Annotated[str, _MODEL]
Machine = Annotated[str, _MACHINE]
SeqLen = Annotated[str, _SEQ_LEN]
ModelIfPlanned = Annotated[str | None, _MODEL]
SeqLenIfPlanned = Annotated[str | None, _SEQ_LEN]
MachineIfKnown = Annotated[
    str | None,
    typer.Option(
        "--machine",
        metavar="NAME|FILE",
        help="By default the machine that the schedule was planned for, if it is a shipped one.",
    ),
]
Predicted = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="A timeline from `simulate -o`; by default the schedule is simulated."
    ),
]
Measured = Annotated[Path | None, typer.Option(metavar="FILE", help="A timeline from `run -o`.")]
TokensPerStep = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Tokens of an optimizer step; by default as few as --optimizer-overhead allows.",
        rich_help_panel=_PLAN,
    ),
]
OptimizerOverhead = Annotated[
    str | None,
    typer.Option(
        metavar="SHARE",
        callback=_check_share,
        help="Share of the step that the optimizer may take where --tokens-per-step is not given: "
        "1% (the default) or 0.01.",
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
OnlyRows = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="COLUMN=VALUE",
        help="Take only such rows of the table: machine=H100, model=8B; may be given again.",
    ),
]
_POLICIES = ", ".join(policy_names())
_POLICY = typer.Option(
    "--policy",
    metavar="NAME",
    help=f"One of: {_POLICIES}; by default {api.DEFAULT_POLICY}.",
    rich_help_panel=_LIMITS,
)
Policy = Annotated[str | None, _POLICY]
PolicyOrAll = Annotated[
    str | None,
    typer.Option(
        "--policy",
        metavar="NAME",
        help=f"One of: {_POLICIES}; by default {api.DEFAULT_POLICY}. "
        f"`{ALL}` compares all but the last; -o then writes the fastest.",
        rich_help_panel=_LIMITS,
    ),
]

Kernels = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="auto (Triton for a CUDA machine, torch's ops for a CPU), eager or triton.",
        rich_help_panel=_PLAN,
    ),
]

Attention = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="auto (what the machine's profile names, else sdpa_flash on CUDA and eager on a CPU), "
        f"or one of: {', '.join(attention_names())}.",
        rich_help_panel=_PLAN,
    ),
]

Nondeterministic = Annotated[
    bool,
    typer.Option(
        "--nondeterministic",
        help="Allow an --attention that does not give the same bits from run to run.",
        rich_help_panel=_PLAN,
    ),
]

Gradients = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        help="What weight gradients are added up in: model (the model's dtype, the default), or "
        "float32.",
        rich_help_panel=_PLAN,
    ),
]
Master = Annotated[
    bool,
    typer.Option(
        "--float32-master",
        help="Keep float32 parameters, m and v in the optimizer's state.",
        rich_help_panel=_PLAN,
    ),
]

Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Dtype of parameters and activations, bfloat16 or float32; by default the model's.",
        rich_help_panel=_PLAN,
    ),
]

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
Graphs = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="CUDA graphs for steps that are not timed op by op: auto (where they pay), on or off.",
    ),
]
TimedSteps = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="So many of the last steps have every op timed; by default 1 on CUDA, all on the CPU.",
    ),
]
Nvtx = Annotated[
    bool, typer.Option("--nvtx", help="Name every op for NVIDIA's profilers (CUDA only).")
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


_FIXED = "What to fix of a plan by optimal"
Homes = Annotated[
    list[str] | None,
    typer.Option(
        "--home",
        metavar="KIND=WHERE",
        help="Where a kind of tensor is at home, again for each: parameter, gradient, "
        "optimizer_state or activation = device or host.",
        rich_help_panel=_FIXED,
    ),
]
RecomputeLevel = Annotated[
    str | None,
    typer.Option(
        metavar="LEVEL",
        help="Recompute every block from INPUT or ATTENTION, or none.",
        rich_help_panel=_FIXED,
    ),
]
Prefetch = Annotated[
    float | None,
    typer.Option(
        metavar="BLOCKS",
        help="Load at most so long before the first use, in times of the longest task.",
        rich_help_panel=_FIXED,
    ),
]
OptimizerOrder = Annotated[
    str | None,
    typer.Option(
        "--optimizer",
        metavar="WHEN",
        help="device (each group as soon as its gradients are there, the default) or "
        "device_after_backward.",
        rich_help_panel=_FIXED,
    ),
]
EffortOfPlan = Annotated[
    str | None,
    typer.Option(
        "--effort",
        metavar="NAME",
        help="quick, normal (the default), or thorough: then more memory is never slower, and a "
        "refusal names the smallest caps that would do; it takes minutes.",
        rich_help_panel=_FIXED,
    ),
]
NoSlowerThan = Annotated[
    list[Path] | None,
    typer.Option(
        "--no-slower-than",
        metavar="FILE",
        help="A schedule of the same step, for less memory or a slower machine, that is the answer "
        "where nothing faster is found; may be given again.",
        rich_help_panel=_PLAN,
    ),
]


@dataclass(frozen=True)
class PlanOptions:
    """The options that say what to plan; None where one is not given."""

    model: str | None
    machine: str | None
    seq_len: str | None
    tokens_per_step: int | None
    optimizer_overhead: str | None
    chunk_tokens: int | None
    chunks_per_round: int | None
    device_mem: str | None
    host_mem: str | None
    policy: str | None
    kernels: str | None = None
    attention: str | None = None
    optimizer: str | None = None
    gradients: str | None = None
    float32_master: bool | None = None
    nondeterministic: bool = False
    dtype: str | None = None

    def given(self) -> list[str]:
        """The flags that are set, but for --machine."""
        names = [name for name, value in vars(self).items() if value not in (None, False)]
        return [f"--{name.replace('_', '-')}" for name in names if name != "machine"]
