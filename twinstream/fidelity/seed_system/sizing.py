"""The seed system's cut and sizes of a step: pure functions from model, caps and machine to a plan.

Source: the rules of als244/ml_dataflow as restated in shared/data/README.md, section 2, and checked
against 919 recorded runs. Two figures were found in those records alone: 28 bytes per token of a
round on the device, and that attention's workspace counts one sequence of keys, padded per packed
sequence. Symbols: C chunk tokens, N chunks per round, P bytes of a layer, s activation slots.
"""

from dataclasses import dataclass
from typing import Literal

from twinstream.fidelity.seed_system.classes import MachineClass
from twinstream.fidelity.seed_system.levels import Levels, choose_levels
from twinstream.models.flops import SavedLevel, model_flops_per_sequence, saved_bytes_per_token
from twinstream.models.spec import ModelSpec
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.workload import Workload

_MIB = 2**20
_RESERVE_BYTES = 200 * _MIB
_DEVICE_BYTES_PER_ROUND_TOKEN = 28
_HOST_BYTES_PER_ROUND_TOKEN = 12
_ASSUMED_FLOP_SHARE = 0.6
_ASSUMED_LINK_SHARE = 0.75
_OPTIMIZER_SHARE = 0.02
_V1_TARGET_S = {"1b": 6.0, "8b": 48.0}

RoundsRule = Literal["v1", "v2"]


class SizingRefused(TwinstreamError):
    """The seed system would not run this; `reason` is its status, as its tables record it."""

    def __init__(self, reason: Literal["failed_dev_mem", "failed_host_mem"], message: str) -> None:
        self.reason = reason
        super().__init__(message)


@dataclass(frozen=True)
class Sizing:
    """The seed system's decisions on a step before it starts.

    `num_optimizer_blocks` layers of Adam state fit beside parameters and gradients once the
    activation slots are idle. `levels` are those of the home activations in (layer, chunk) order;
    the last `device_acts` activations of a round never leave the device.
    """

    seq_len: int
    chunk_tokens: int
    chunks_per_round: int
    rounds_per_step: int
    param_blocks: int
    grad_blocks: int
    device_acts: int
    num_optimizer_blocks: int
    levels: tuple[SavedLevel, ...]
    used_host_bytes: int
    used_device_bytes: int

    @property
    def home_acts(self) -> int:
        return len(self.levels)

    def count(self, level: SavedLevel) -> int:
        return self.levels.count(level)

    @property
    def workload(self) -> Workload:
        return Workload(
            seq_len=self.seq_len,
            chunk_tokens=self.chunk_tokens,
            chunks_per_round=self.chunks_per_round,
            rounds_per_step=self.rounds_per_step,
        )


def size_step(
    spec: ModelSpec,
    seq_len: int,
    machine: MachineClass,
    *,
    host_bytes: int,
    device_bytes: int,
    rounds: RoundsRule | int = "v2",
) -> Sizing:
    """The plan of the seed system, or its refusal.

    Args:
        spec: a dense model in bf16; head and embedding have matrices of their own.
        seq_len: tokens of a sequence.
        machine: constants of the GPU's class.
        host_bytes, device_bytes: the caps.
        rounds: of a step; by the rule that is named, or as given.

    Raises:
        SizingRefused: it would fail; the reason is the status in its tables.
        UnknownTarget: rule v1 has no target for this model.
        UnsuitableModel: it trains models in bf16 with an LM head of their own, and no others.
    """
    others = spec.tied_embeddings or spec.qk_norm or spec.qkv_bias or spec.experts is not None
    if spec.dtype != "bfloat16" or others:
        raise UnsuitableModel(
            "policy 'ml_dataflow' knows models in bf16 with an LM head of their own, without "
            f"QK-norm, biases and experts; '{spec.name}' is not one: take another policy or model"
        )
    sizes = sizes_of_round(spec, seq_len, machine)
    device = _Device(spec, sizes, machine, device_bytes)
    layers = spec.num_layers
    params, grads, slots = device.partition()
    home = layers * sizes.chunks_per_round - slots
    budget = host_bytes - _host_base_bytes(spec, sizes)
    levels = choose_levels(_levels(spec, sizes, machine, slots), home, budget)
    used_host = _host_base_bytes(spec, sizes) + sum(saved_bytes(spec, sizes, lv) for lv in levels)
    if used_host > host_bytes:
        raise SizingRefused(
            "failed_host_mem",
            f"the host cap of {host_bytes / 2**30:.2f} GiB does not hold state and {home} saved "
            f"activations at the levels chosen, {used_host / 2**30:.2f} GiB: raise --host-mem, or "
            "--device-mem so that more of them stay on the device",
        )
    used = device.used_bytes + (params + grads) * sizes.layer_bytes
    num_rounds = rounds if isinstance(rounds, int) else _rounds(spec, sizes, machine, rounds)
    return Sizing(
        seq_len=seq_len,
        chunk_tokens=sizes.chunk_tokens,
        chunks_per_round=sizes.chunks_per_round,
        rounds_per_step=num_rounds,
        param_blocks=params,
        grad_blocks=grads,
        device_acts=slots,
        num_optimizer_blocks=min(
            layers, (device_bytes - used + device.released_bytes) // (2 * sizes.layer_bytes)
        ),
        levels=levels,
        used_host_bytes=used_host,
        used_device_bytes=used + slots * saved_bytes(spec, sizes, SavedLevel.FULL),
    )


class UnsuitableModel(TwinstreamError):
    """The seed system does not train such a model."""


class UnknownTarget(TwinstreamError):
    """Rule v1 has no target time for this model."""


@dataclass(frozen=True)
class RoundSizes:
    """The cut of a round, before any memory is looked at."""

    seq_len: int
    chunk_tokens: int
    chunks_per_round: int
    sequence_groups: int
    layer_bytes: int
    chunk_act_bytes: int

    @property
    def sequences_per_chunk(self) -> int:
        return max(1, self.chunk_tokens // self.seq_len)

    @property
    def sliced(self) -> bool:
        return self.chunk_tokens < self.seq_len

    @property
    def longer_tokens(self) -> int:
        return max(self.chunk_tokens, self.seq_len)


def sizes_of_round(spec: ModelSpec, seq_len: int, machine: MachineClass) -> RoundSizes:
    """Chunks no smaller than the class's minimum; rounds save of a layer what its weights take.

    >>> from twinstream.models.presets import load_preset
    >>> from twinstream.fidelity.seed_system.classes import machine_class
    >>> sizes = sizes_of_round(load_preset("8b"), 65536, machine_class("h100"))
    >>> sizes.chunk_tokens, sizes.chunks_per_round
    (16384, 4)
    """
    least = machine.min_chunk_tokens
    if seq_len > least:
        count = next(n for n in range(seq_len // least, 0, -1) if seq_len % n == 0)
        chunk = seq_len // count
    else:
        chunk = -(-least // seq_len) * seq_len
    chunks = max(1, seq_len // chunk)
    layer_bytes = spec.num_block_parameters * spec.itemsize
    act = _chunk_act_bytes(spec, chunk)
    groups = max(1, _half_up(layer_bytes / act / chunks))
    return RoundSizes(seq_len, chunk, chunks * groups, groups, layer_bytes, act)


def saved_bytes(spec: ModelSpec, sizes: RoundSizes, level: SavedLevel) -> int:
    """Bytes of one chunk's saved activations of a layer."""
    return sizes.chunk_tokens * saved_bytes_per_token(spec, level)


def _chunk_act_bytes(spec: ModelSpec, chunk_tokens: int) -> int:
    """Return a chunk's saved activations without norm scalars and log-sum-exp: what it sizes by."""
    widths = 2 * spec.d_model + 2 * spec.d_q + 2 * spec.d_kv + 2 * spec.d_ff
    return spec.itemsize * chunk_tokens * widths


def _half_up(value: float) -> int:
    """C's round(), of positive numbers."""
    return int(value + 0.5)


def _rounds(spec: ModelSpec, sizes: RoundSizes, machine: MachineClass, rule: RoundsRule) -> int:
    sequences = sizes.sequence_groups * sizes.sequences_per_chunk
    flops = model_flops_per_sequence(spec, sizes.seq_len) * sequences
    round_s = flops / (_ASSUMED_FLOP_SHARE * machine.peak_flop_per_s)
    if rule == "v1":
        if spec.name not in _V1_TARGET_S:
            known = ", ".join(_V1_TARGET_S)
            raise UnknownTarget(
                f"rounds rule v1 has target times for {known}, not for '{spec.name}': give the "
                "rounds per step"
            )
        target_s = _V1_TARGET_S[spec.name]
    else:
        state_bytes = 2 * sizes.layer_bytes * spec.num_layers
        link = _ASSUMED_LINK_SHARE * machine.link_bytes_per_s
        target_s = state_bytes / link / _OPTIMIZER_SHARE
    return max(1, _half_up(target_s / round_s))


def _host_base_bytes(spec: ModelSpec, sizes: RoundSizes) -> int:
    """All but saved activations; gradients and Adam state of embedding and head are not there."""
    tokens = sizes.chunk_tokens * sizes.chunks_per_round
    ends = spec.itemsize * (spec.vocab_size * spec.d_model + spec.d_model * (1 + spec.vocab_size))
    blocks = 4 * spec.num_layers * sizes.layer_bytes
    return ends + blocks + tokens * (_HOST_BYTES_PER_ROUND_TOKEN + 4 * spec.d_model)


def _levels(spec: ModelSpec, sizes: RoundSizes, machine: MachineClass, slots: int) -> Levels:
    """Return what the choice of levels knows; its window is as long as the slots' forward compute.

    One of the projections of Q and of the output does not count: of what was tried, only so are
    the recorded runs of packed sequences all met, some of them within 1 % of a threshold.
    """
    window_bytes = None
    if not sizes.sliced:
        width = spec.d_q + 2 * spec.d_kv + 3 * spec.d_ff
        matmul = 2 * sizes.chunk_tokens * spec.d_model * width
        attention = 2 * sizes.chunk_tokens * sizes.seq_len * spec.d_q
        window_s = slots * (matmul + attention) / (_ASSUMED_FLOP_SHARE * machine.peak_flop_per_s)
        window_bytes = window_s * _ASSUMED_LINK_SHARE * machine.link_bytes_per_s
    return Levels(
        num_layers=spec.num_layers,
        chunks_per_round=sizes.chunks_per_round,
        slots=slots,
        bytes_of={level: saved_bytes(spec, sizes, level) for level in SavedLevel},
        window_bytes=window_bytes,
    )


@dataclass(frozen=True)
class _Device:
    spec: ModelSpec
    sizes: RoundSizes
    machine: MachineClass
    cap_bytes: int

    @property
    def sticky_bytes(self) -> int:
        """Return what the code takes off the cap before it divides the rest."""
        spec, sizes = self.spec, self.sizes
        d, v, c, n = spec.d_model, spec.vocab_size, sizes.chunk_tokens, sizes.chunks_per_round
        contexts = 2 * (2 * sizes.longer_tokens * spec.d_kv * 2)
        ends = 8 * (v * d + d * (1 + v))
        transitions = 2 * n * c * d * 2
        workspace = 2 * c * (d + spec.d_ff)
        norms = 2 * c * d * 2
        fixed = _RESERVE_BYTES + self._workspace_bytes()
        kept = fixed + contexts + ends + transitions + workspace
        return kept + norms + sizes.chunk_act_bytes + self._head_bytes()

    @property
    def used_bytes(self) -> int:
        """Return what is there beside blocks and slots: some more than was taken off."""
        sizes = self.sizes
        uncounted = saved_bytes(self.spec, sizes, SavedLevel.FULL) - sizes.chunk_act_bytes
        round_tokens = sizes.chunk_tokens * sizes.chunks_per_round
        return self.sticky_bytes + uncounted + _DEVICE_BYTES_PER_ROUND_TOKEN * round_tokens

    @property
    def released_bytes(self) -> int:
        """Return the used bytes laid out after the activation slots' beginning: gradients of an
        activation, recomputed norms, head and logits. Adam state takes their place."""
        norms = 2 * self.sizes.chunk_tokens * self.spec.d_model * 2
        return saved_bytes(self.spec, self.sizes, SavedLevel.FULL) + norms + self._head_bytes()

    def _head_bytes(self) -> int:
        d, v, c = self.spec.d_model, self.spec.vocab_size, self.sizes.chunk_tokens
        return 2 * c * v + c * (2 * (d + v) + 4)

    def partition(self) -> tuple[int, int, int]:
        """Blocks of parameters, blocks of gradients, activation slots."""
        sizes, layers = self.sizes, self.spec.num_layers
        layer, act, n = sizes.layer_bytes, sizes.chunk_act_bytes, sizes.chunks_per_round
        left = self.cap_bytes - self.sticky_bytes - _RESERVE_BYTES
        if left < 2 * layer + 2 * act:
            needed = self.sticky_bytes + _RESERVE_BYTES + 2 * layer + 2 * act
            raise SizingRefused(
                "failed_dev_mem",
                f"the {self.cap_bytes / 2**30:.2f} GiB of device memory that the cap leaves beside "
                "the machine's reserve are short of the "
                f"{needed / 2**30:.2f} GiB for one layer and two activations beside buffers and "
                "head: raise --device-mem",
            )
        blocks = min(layers, left // (2 * layer + n * act))
        if blocks == 0:
            return 1, 1, min(layers * n, (left - 2 * layer) // act)
        left -= blocks * (2 * layer + n * act)
        params, slots = blocks, blocks * n
        if blocks < layers:
            if left >= layer:
                params, left = params + 1, left - layer
            slots = min(layers * n, slots + left // act)
        return params, blocks, slots

    def _workspace_bytes(self) -> int:
        """Workspace of attention's backward kernel; semaphores count for the longest chunk."""
        spec, sizes = self.spec, self.sizes
        heads, kv_heads, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        packed = sizes.sequences_per_chunk
        if self.machine.workspace == "flash2":
            rows = sizes.chunk_tokens + 128 * packed
            splits = -(-self.machine.num_multiprocessors // (packed * heads))
            expanded = 4 * sizes.seq_len * heads * head_dim
            return 4 * heads * rows + expanded + splits * rows * heads * head_dim * 8
        tile_m, tile_n = self.machine.tiles(head_dim)
        rows = _padded(sizes.chunk_tokens, packed, tile_m)
        keys = _padded(sizes.seq_len, packed, tile_n)
        semaphores = 4 * packed * heads * -(-sizes.chunk_tokens // tile_m)
        accumulated = 4 * heads * rows * head_dim + 8 * kv_heads * keys * head_dim
        return 8 * heads * rows + accumulated + semaphores


def _padded(tokens: int, sequences: int, tile: int) -> int:
    return -(-(tokens + sequences * tile) // tile) * tile
