"""What a campaign measures, in order of value."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.presets import load_preset
from twinstream.models.providers.trained import trained_of
from twinstream.models.recipes.recipe import KernelChoice, Recipe
from twinstream.planner.request import TrainingStep
from twinstream.schedule.workload import Workload

Backend = Literal["cpu", "cuda"]
ModelSize = Literal["full", "tiny"]
Size = Literal["full", "short", "tiny"]
Dtype = Literal["bfloat16", "float32"]
PeerKind = Literal["plain", "compiled", "fsdp_offload"]
PEER_KINDS: tuple[PeerKind, ...] = ("plain", "compiled", "fsdp_offload")
Stage = Literal["facts", "check", "smoke", "probe", "train", "cells", "peers", "tests"]
STAGES: tuple[Stage, ...] = (
    "facts", "check", "smoke", "probe", "train", "cells", "peers", "tests",
)  # fmt: skip
FACTS, CHECK, SMOKE, KERNELS, PROBE, TRAIN, TESTS = (
    "facts", "check", "smoke", "kernels", "probe", "train", "tests",
)  # fmt: skip
# The stages of a size where none are named.
STAGES_OF: Mapping[Size, tuple[Stage, ...]] = {
    "full": tuple(stage for stage in STAGES if stage != "check"),
    "short": ("facts", "check", "smoke", "probe", "cells", "peers", "tests"),
    "tiny": STAGES,
}
_NUM_TELLING = 3  # cells that come before everything else
_GIB = 2**30
_MIB = 2**20
_TOKENS_PER_STEP = 524_288
NONDETERMINISTIC = "sdpa_cudnn"
_LORA = "r=16"


@dataclass(frozen=True)
class Cell:
    """A step to plan, predict and measure; `device_bytes` None is the whole device.

    `short_rounds` are the rounds of the two passes that are measured and extended to the step;
    with `whole` the step itself is run as well, as a job of its own. `goal_tokens_per_s` is printed
    beside. With `attention` it runs with this one, deterministic or not, not with the best that is.
    With `lora`, options as `train` takes them, adapters train; `base` says how the
    base is kept.
    """

    key: str
    model: str
    seq_len: int
    device_bytes: int | None
    host_bytes: int | None
    tokens_per_step: int = _TOKENS_PER_STEP
    policy: str = "optimal"
    short_rounds: tuple[int, int] = (2, 4)
    whole: bool = False
    chunk_tokens: int | None = None
    chunks_per_round: int | None = None
    goal_tokens_per_s: float | None = None
    dtype: Dtype | None = None
    attention: str | None = None
    lora: str | None = None
    base: str | None = None

    @property
    def spec(self) -> ModelSpec:
        return spec_of(self.model, self.dtype)

    def recipe(self, kernels: KernelChoice) -> Recipe:
        """What is trained, with these kernels."""
        trained = trained_of(self.spec, self.lora, (), self.base)
        return trained.model_copy(update={"kernels": kernels})

    def shortened(self, work: Workload, rounds: int) -> "Cell":
        """The same cut into chunks and rounds as the whole step, of so many rounds."""
        tokens = work.chunk_tokens * work.chunks_per_round * rounds
        return replace(
            self, tokens_per_step=tokens, chunk_tokens=work.chunk_tokens,
            chunks_per_round=work.chunks_per_round,
        )  # fmt: skip

    def step(self, recipe: Recipe) -> TrainingStep:
        return TrainingStep(
            self.seq_len, self.tokens_per_step, self.chunk_tokens, self.chunks_per_round, recipe
        )


@dataclass(frozen=True)
class Peer:
    """Another way to train the same model; compared with the cell `beside`.

    `early` ones come right after the most telling cells.
    """

    key: str
    kind: PeerKind
    model: str
    seq_len: int
    micro_batch_tokens: int
    beside: str
    tokens_per_step: int = _TOKENS_PER_STEP
    expected_s: float = 45.0
    dtype: Dtype | None = None
    early: bool = False

    @property
    def spec(self) -> ModelSpec:
        return spec_of(self.model, self.dtype)


@dataclass(frozen=True)
class WholeStep:
    """The whole step of a cell, run once: what extending its short passes is compared with."""

    cell: Cell

    @property
    def key(self) -> str:
        return f"{self.cell.key} whole"


@dataclass(frozen=True)
class Plan:
    """The whole of a campaign of one size.

    Where they are `by_name`, whole steps and peers are done only where `--only` names them.
    """

    cells: tuple[Cell, ...]
    peers: tuple[Peer, ...]
    by_name: bool = False

    def asked(self, only: Sequence[str]) -> tuple[Cell | WholeStep | Peer, ...]:
        """Those to do, in order: that have one of these texts in their name, where there are some.

        A text that names a cell does not also name what is done by name.
        """
        return tuple(job for job in self.in_order() if self._is_asked(job, only))

    def _is_asked(self, job: Cell | WholeStep | Peer, only: Sequence[str]) -> bool:
        if isinstance(job, Cell) or not self.by_name:
            return not only or any(text in job.key for text in only)
        named = (text for text in only if not any(text in cell.key for cell in self.cells))
        return any(text in job.key for text in named)

    def in_order(self) -> tuple[Cell | WholeStep | Peer, ...]:
        """The most telling cells, the first whole, early peers, the other whole steps of these
        cells, the other cells, other peers."""
        telling, others = self.cells[:_NUM_TELLING], self.cells[_NUM_TELLING:]
        whole = [WholeStep(cell) for cell in telling if cell.whole]
        return (
            *telling,
            *whole[:1],
            *(peer for peer in self.peers if peer.early),
            *whole[1:],
            *others,
            *(WholeStep(cell) for cell in others if cell.whole),
            *(peer for peer in self.peers if not peer.early),
        )


def campaign_of(size: Size, host_bytes: int | None = None, backend: Backend = "cpu") -> Plan:
    """Cells and peers, the most telling first; `host_bytes` caps pinned memory.

    The tiny models are float32 on a CPU, and bf16 on CUDA, as its kernels want it. What is short is
    of tiny models on a CPU.
    """
    if size == "full":
        return _full(host_bytes)
    if size == "short":
        return _short(host_bytes) if backend == "cuda" else _short_of_tiny(host_bytes)
    return _tiny(host_bytes, None if backend == "cpu" else "bfloat16")


def spec_of(preset: str, dtype: Dtype | None) -> ModelSpec:
    """A preset, in another dtype where one is given."""
    spec = load_preset(preset)
    return spec if dtype is None else spec.model_copy(update={"dtype": dtype})


def _cell(host_bytes: int | None, model: str, seq_len: int, gib: int, goal: float | None = None,
          **changes: object) -> Cell:  # fmt: skip
    given: dict[str, object] = {
        "key": f"{model} S{seq_len} {gib} GiB", "model": model, "seq_len": seq_len,
        "device_bytes": gib * _GIB, "host_bytes": host_bytes, "goal_tokens_per_s": goal,
    }  # fmt: skip
    return Cell(**(given | changes))  # type: ignore[arg-type]


def _short(host_bytes: int | None) -> Plan:
    """What fits a lease of 15 minutes: offloading, experts, adapters, long sequences."""
    cell = partial(_cell, host_bytes)
    cells = (
        cell("8b", 8192, 24, 11_000, whole=True),
        cell("8b", 1024, 40, whole=True),
        cell("7b_1b", 4096, 40),
        cell("8b", 8192, 24, key="8b S8192 24 GiB lora", lora=_LORA),
        cell("8b", 8192, 24, key="8b S8192 24 GiB nf4 lora", lora=_LORA, base="nf4"),
        cell("8b", 65536, 24, short_rounds=(1, 2)),
    )
    beside = {"8b S8192": "8b S8192 24 GiB", "8b S1024": "8b S1024 40 GiB"}
    peers = (
        replace(peer, beside=beside[peer.beside[:8]], early=False)
        for peer in _full(host_bytes).peers
    )
    return Plan(cells, tuple(peers), by_name=True)


def _short_of_tiny(host_bytes: int | None) -> Plan:
    """The same, of tiny models."""
    tiny = _tiny(host_bytes, None)
    first = tiny.cells[0]
    experts = replace(first, key="tiny-experts S64", model="tiny-experts", whole=False)
    adapters = replace(first, key="tiny S64 lora", lora="r=4", whole=False, device_bytes=None)
    cells = (
        first,
        replace(experts, device_bytes=None, goal_tokens_per_s=None),
        replace(adapters, goal_tokens_per_s=None),
        replace(adapters, key="tiny S64 nf4 lora", base="nf4", goal_tokens_per_s=None),
    )
    return Plan(cells, tiny.peers, by_name=True)


def _full(host_bytes: int | None) -> Plan:
    cell = partial(_cell, host_bytes)

    def other(found: Cell) -> Cell:
        """With the attention that is fast and not deterministic."""
        key = f"{found.key} {NONDETERMINISTIC}"
        return replace(found, key=key, attention=NONDETERMINISTIC, whole=False)

    resident = Cell(
        key="8b S8192 resident", model="8b", seq_len=8192, device_bytes=None,
        host_bytes=host_bytes, policy="resident",
    )  # fmt: skip
    first = cell("8b", 8192, 78, 12_500, whole=True), cell("8b", 8192, 24, 11_000, whole=True)
    cells = (
        *first,
        cell("8b", 1024, 9, 10_500, whole=True),
        *(other(found) for found in first),
        resident,
        cell("1b", 8192, 4),
        cell("1b", 8192, 16),
        cell("8b", 1024, 24),
        cell("8b", 8192, 40),
        cell("15b", 8192, 78),
        cell("8b", 8192, 9),
        cell("8b", 8192, 16),
        cell("8b", 1024, 78),
        cell("8b", 1024, 40),
        cell("8b", 1024, 16),
        cell("8b", 8192, 130),
        cell("8b", 1024, 130),
        cell("8b", 65536, 24, short_rounds=(1, 2)),
    )
    beside = "8b S8192 78 GiB"
    peers = (
        Peer("compiled 8b S8192", "compiled", "8b", 8192, 8192, beside, expected_s=70.0,
             early=True),
        Peer("plain 8b S8192", "plain", "8b", 8192, 8192, beside),
        Peer("plain 8b S1024", "plain", "8b", 1024, 8192, "8b S1024 78 GiB"),
        Peer("compiled 8b S1024", "compiled", "8b", 1024, 8192, "8b S1024 78 GiB", expected_s=70.0),
        Peer("fsdp_offload 8b S8192", "fsdp_offload", "8b", 8192, 16384, "8b S8192 24 GiB",
             expected_s=110.0),
        Peer("fsdp_offload 8b S1024", "fsdp_offload", "8b", 1024, 16384, "8b S1024 24 GiB",
             expected_s=110.0),
    )  # fmt: skip
    return Plan(cells, peers)


def _tiny(host_bytes: int | None, dtype: Dtype | None) -> Plan:
    def cell(name: str, **changes: object) -> Cell:
        given: dict[str, object] = {
            "key": f"tiny S64 {name}", "model": "tiny", "seq_len": 64, "device_bytes": None,
            "host_bytes": host_bytes, "tokens_per_step": 768, "chunk_tokens": 128,
            "chunks_per_round": 1,
            "dtype": dtype,
        }  # fmt: skip
        return Cell(**(given | changes))  # type: ignore[arg-type]

    # on CUDA a cap of some MiB would be less than context and libraries take
    other = NONDETERMINISTIC if dtype else "sdpa_cpu"
    offloading = {"policy": "streaming"} if dtype else {"device_bytes": 6 * _MIB}
    cells = (
        cell("offloading", goal_tokens_per_s=1.0, whole=True, **offloading),
        cell("resident", policy="resident"),
        cell("1 MiB", device_bytes=_MIB),
        cell(f"resident {other}", policy="resident", attention=other),
    )
    peers = tuple(
        Peer(
            key=f"{kind} tiny S64",
            kind=kind,
            model="tiny",
            seq_len=64,
            micro_batch_tokens=128,
            beside="tiny S64 resident",
            tokens_per_step=768,
            expected_s=10.0,
            dtype=dtype,
        )
        for kind in PEER_KINDS
    )
    return Plan(cells, peers)
