"""Try an attention implementation on a device: is it right, and how fast?

Right means: near the eager reference at a reduced size; finite, with ordinary and with low scores,
at the size asked for; and the same bits twice where it says that it is deterministic. Memory taken
beyond what is declared is told, not refused: it can be reserved.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from twinstream.executor.kernels.attention.canary import AttentionCanaryError, check_shape
from twinstream.executor.kernels.attention.implementation import AttentionImplementation
from twinstream.executor.kernels.attention.registry import (
    attention_implementation,
    attention_reason,
)
from twinstream.executor.kernels.attention.trial import AttentionTrial, Results
from twinstream.executor.probe.timing.device_timing import DeviceTimer
from twinstream.models.kernel_costs.attention_libraries import DeviceName
from twinstream.models.kernel_costs.attention_limits import attention_limits
from twinstream.models.kernel_costs.attention_shape import AttentionPass, AttentionShape
from twinstream.models.kernel_costs.work import ChunkWork
from twinstream.models.spec import ModelSpec
from twinstream.schedule.cost import Work
from twinstream.schedule.workload import Workload

Timer = Callable[[Callable[[], object]], float]

# Largest difference over largest value, from eager attention in float32: results are rounded to
# 2**-9 relative in bf16, a few times; float32 sums differ by their order.
_TOLERANCES = {"bfloat16": 2e-2, "float32": 1e-4}
_REDUCED_QUERIES = 192  # 64 modulo 128, where cuDNN has gone wrong
_REDUCED_PAST = 320
_REDUCED_SEQUENCES = 2
_REDUCED_KEY_HEADS = 2
# torch counts the whole of a block whose rest it does not split off, up to 1 MiB more, and rounds
# large ones to 2 MiB: of each of the eight buffers that a backward pass has at most.
_ROUNDING_BYTES = 8 * 2 * 2**20


@dataclass(frozen=True)
class AttentionCase:
    """One shape of a workload, and what the cost model says it amounts to."""

    shape: AttentionShape
    forward: Work
    backward: Work


@dataclass(frozen=True)
class AttentionCandidate:
    """An implementation that was tried; `refused` says why it cannot be chosen.

    `time_ns` is of forward and backward of every case. `excess_bytes` of device memory are taken
    beyond what is declared, by the worst call.
    """

    name: str
    refused: str | None = None
    time_ns: float = 0.0
    excess_bytes: int = 0
    deterministic: bool = True


def attention_cases(spec: ModelSpec, workload: Workload) -> tuple[AttentionCase, ...]:
    """The attention of a step: of packed sequences one case, of slices the first and the last."""
    chunks = workload.chunks_per_sequence
    starts = dict.fromkeys((0, (chunks - 1) * workload.chunk_tokens))
    return tuple(_case(spec, workload, start) for start in starts)


def try_attention(
    name: str, cases: Sequence[AttentionCase], device: DeviceName, timer: Timer | None = None
) -> AttentionCandidate:
    """Try an implementation on every case: whether it is right, and how fast.

    Args:
        name: of the implementation.
        cases: all of one dtype.
        device: of this machine.
        timer: of a call, in ns.
    """
    timer = timer or DeviceTimer(torch.device(device)).mean_ns
    with torch.no_grad():
        if refused := _refusal(name, cases, device):
            return AttentionCandidate(name, refused)
        implementation = attention_implementation(name)
        time_ns, excess_bytes = 0.0, 0
        for case in cases:
            trial = AttentionTrial(implementation, case.shape, torch.device(device))
            if refused := _fault(trial, implementation, case.shape, device):
                return AttentionCandidate(name, refused)
            if device == "cuda":
                excess_bytes = max(excess_bytes, _excess_bytes(name, trial, case.shape))
            time_ns += timer(trial.forward) + timer(trial.backward)
    return AttentionCandidate(name, None, time_ns, excess_bytes, implementation.deterministic)


def _refusal(name: str, cases: Sequence[AttentionCase], device: DeviceName) -> str | None:
    """Why it cannot run here, or that it is wrong at a reduced size."""
    for case in cases:
        if reason := attention_reason(name, device, case.shape):
            return reason
    tolerance = _TOLERANCES[cases[0].shape.dtype]
    for case in cases:
        error = reference_error(name, reduced(case.shape), device)
        if not error <= tolerance:  # or NaN
            return f"it is {error:.1e} off the reference at a reduced size, over {tolerance:.0e}"
    return None


def _fault(
    trial: AttentionTrial, tried: AttentionImplementation, shape: AttentionShape, device: DeviceName
) -> str | None:
    """What is wrong at the size asked for, or None."""
    try:
        check_shape(tried.name, shape, device)
    except AttentionCanaryError as error:
        return str(error)
    if tried.deterministic and not trial.results().same_bits(trial.results()):
        return f"its results differ from run to run for {shape}"
    return None


def _excess_bytes(name: str, trial: AttentionTrial, shape: AttentionShape) -> int:
    """What the pass that takes most beyond what it declares takes so, but for rounding."""
    calls: dict[AttentionPass, Callable[[], object]] = {
        "forward": trial.forward, "backward": trial.backward,
    }  # fmt: skip
    over = [
        taken_bytes(call) - attention_limits(name).allocates(of_pass, shape)
        for of_pass, call in calls.items()
    ]
    return max(over) if max(over) > _ROUNDING_BYTES else 0


def taken_bytes(call: Callable[[], object]) -> int:
    """Return the most that a call allocates on the CUDA device, beside what was there before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def reduced(shape: AttentionShape) -> AttentionShape:
    """A small shape of the same kind: as many query heads a key head, and slices stay slices."""
    key_heads = min(shape.num_kv_heads, _REDUCED_KEY_HEADS)
    longest = min(shape.longest_tokens, _REDUCED_QUERIES)
    packed = min(shape.most_packed, _REDUCED_SEQUENCES + 1)
    most = packed * longest if packed else _REDUCED_QUERIES
    queries = min(shape.num_queries, most)
    return replace(
        shape,
        num_sequences=min(shape.num_sequences, _REDUCED_SEQUENCES),
        num_queries=queries,
        num_keys=queries + min(shape.num_past, _REDUCED_PAST),
        num_heads=shape.num_heads // shape.num_kv_heads * key_heads,
        num_kv_heads=key_heads,
        most_packed=packed,
        longest_tokens=longest,
    )


def reference_error(name: str, shape: AttentionShape, device: DeviceName) -> float:
    """The largest difference from eager attention in float32, over the largest value."""
    where = torch.device(device)
    trial = AttentionTrial(attention_implementation(name), shape, where)
    exact = replace(shape, dtype="float32")
    reference = AttentionTrial(attention_implementation("eager"), exact, where)
    for into, operand in (
        (reference.q, trial.q),
        (reference.kv, trial.kv),
        (reference.d_out, trial.d_out),
    ):
        into.copy_(operand)
    return largest_difference(trial.results(), reference.results())


def largest_difference(found: Results, expected: Results) -> float:
    """Return the largest error over the largest expected value; NaN if a result has one."""
    pairs = zip(found.by_name().values(), expected.by_name().values(), strict=True)
    errors = [float((a.float() - b).abs().max() / b.abs().max()) for a, b in pairs]
    return max(errors, key=lambda error: (error != error, error))


def _case(spec: ModelSpec, workload: Workload, start: int) -> AttentionCase:
    tokens, packing = workload.chunk_tokens, workload.packing
    queries = tokens if packing else min(tokens, workload.seq_len)
    work = ChunkWork(spec, workload, start)
    shape = AttentionShape(
        num_sequences=tokens // queries,
        num_queries=queries,
        num_keys=start + queries,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=spec.dtype,
        sliced=workload.sliced,
        most_packed=packing.most_sequences if packing else 0,
        longest_tokens=workload.seq_len if packing else 0,
    )
    return AttentionCase(shape, work.attention_forward(), work.attention_backward())
