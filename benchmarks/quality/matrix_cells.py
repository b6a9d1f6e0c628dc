"""The cells of the quality matrix: machines x models x sequence lengths x caps of both memories.

A fixed list: arithmetic picks it, no planner and no random number. Of every (machine, model,
sequence length) some pairs of caps are taken that should do by the estimate of `_fits`, spread
evenly from the smallest to the largest. The order is that of the multiples of the golden ratio,
modulo one: any prefix is spread evenly over the list.

The estimate: at home lie 8 bytes a parameter (bf16 parameter, gradient and both AdamW states) and
the saved activations of one round at level INPUT (12,296 bytes per token and layer for 8b), on
the host and in what the device has to spare. The device also needs room for work: the head with
its gradient, three layers' parameters, a chunk's activations at level FULL and, of a sliced
sequence, one layer's K and V (bf16) and their gradients (fp32).
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.presets import load_preset
from twinstream.models.providers.flops import SavedLevel, saved_bytes_per_token

GIB = 2**30
MACHINES = ("h100", "h200", "a100", "rtx5090", "rtx3090")
MODELS = ("1b", "8b", "15b", "32b")
SEQ_LENS = (512, 2048, 8192, 32_768, 131_072, 524_288, 1_048_576)
# Each machine also has its whole memory as a cap, in whole GiB.
DEVICE_GIB = (8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 110, 140)
# Profiles call their host memory assumed ("state the host cap of your job"), so any cap may stand.
HOST_GIB = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
TOKENS_PER_STEP = 262_144
_PAIRS_OF_CAPS = 2  # per machine, model and sequence length
_STATE_BYTES_PER_PARAMETER = 8
_CHUNK_TOKENS = 2048  # a small chunk, as caps that are just enough need
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Cell:
    """One row of the matrix."""

    machine: str
    model: str
    seq_len: int
    device_gib: int
    host_gib: int

    @property
    def tokens_per_step(self) -> int:
        """262,144 tokens, rounded up to whole sequences: the same for every policy and plan."""
        return -(-TOKENS_PER_STEP // self.seq_len) * self.seq_len

    @property
    def key(self) -> tuple[str, ...]:
        """What names the cell in a file."""
        numbers = self.seq_len, self.device_gib, self.host_gib
        return (self.machine, self.model, *(str(number) for number in numbers))

    def __str__(self) -> str:
        caps = f"{self.device_gib} + {self.host_gib} GiB"
        return f"{self.machine} {self.model} {self.seq_len:,} {caps}"


def cells() -> list[Cell]:
    """The matrix, in an order of which any prefix is a fair sample."""
    found = list(_cells_by_axis())
    return [found[i] for i in sorted(range(len(found)), key=lambda i: (i + 1) * _GOLDEN % 1)]


def a_third() -> list[Cell]:
    """83 cells of the matrix, drawn once, to work with."""
    whole = cells()
    return [whole[i] for i in sorted(random.Random(32).sample(range(len(whole)), 83))]


def state_gib(model: str) -> float:
    """Parameters, gradients and optimizer state of a preset."""
    return _STATE_BYTES_PER_PARAMETER * load_preset(model).num_parameters / GIB


def _cells_by_axis() -> Iterator[Cell]:
    number = 0
    for machine in MACHINES:
        profile = load_machine(machine)
        largest = int(profile.number("device_memory_bytes") / GIB)
        reserve = profile.number("device_reserve_bytes") / GIB
        device_caps = sorted({cap for cap in DEVICE_GIB if cap <= largest} | {largest})
        for model in MODELS:
            spec = load_preset(model)
            for seq_len in SEQ_LENS:
                fitting = [
                    (device, host)
                    for device in device_caps
                    for host in HOST_GIB
                    if _fits(spec, seq_len, device - reserve, host)
                ]
                for device, host in _spread(fitting, number):
                    yield Cell(machine, model, seq_len, device, host)
                number += 1


def _spread(pairs: list[tuple[int, int]], number: int) -> list[tuple[int, int]]:
    """Some of the pairs at equal steps; where they start differs with the number."""
    count = min(_PAIRS_OF_CAPS, len(pairs))
    start = number * _GOLDEN % 1
    return [pairs[int((i + start) / count * len(pairs))] for i in range(count)]


def _fits(spec: ModelSpec, seq_len: int, device_gib: float, host_gib: float) -> bool:
    spare_gib = device_gib - _work_bytes(spec, seq_len) / GIB
    return spare_gib >= 0 and _home_bytes(spec, seq_len) / GIB <= host_gib + spare_gib


def _home_bytes(spec: ModelSpec, seq_len: int) -> int:
    round_tokens = max(seq_len, _CHUNK_TOKENS)
    saved = spec.num_layers * saved_bytes_per_token(spec, SavedLevel.INPUT) * round_tokens
    return _STATE_BYTES_PER_PARAMETER * spec.num_parameters + saved


def _work_bytes(spec: ModelSpec, seq_len: int) -> int:
    head = 2 * spec.vocab_size * spec.d_model * spec.itemsize
    layers = 3 * spec.num_block_parameters * spec.itemsize
    chunk = _CHUNK_TOKENS * saved_bytes_per_token(spec, SavedLevel.FULL)
    context = 2 * spec.d_kv * (spec.itemsize + 4) * seq_len if seq_len > _CHUNK_TOKENS else 0
    return head + layers + chunk + context
