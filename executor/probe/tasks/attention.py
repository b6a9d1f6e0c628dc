"""Which attention implementation is the fastest on a device, of those that are right there.

Right means: near the eager reference at a reduced size; finite, with ordinary and with low scores,
at the size asked for; and the same bits twice. Memory taken beyond what is declared is told, not
refused: it can be reserved. What is measured gives the efficiency curves of attention, too.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise

import torch

from twinstream.executor.kernels.attention.canary import AttentionCanaryError, check_shape
from twinstream.executor.kernels.attention.registry import (
    attention_implementation,
    attention_reason,
)
from twinstream.executor.kernels.attention.trial import Results, Trial
from twinstream.executor.probe.tasks.kernels import Sample
from twinstream.executor.probe.timing.fit import fit_line
from twinstream.executor.probe.timing.timing import median_ns
from twinstream.hardware_profiles.schema import AttentionChoice, Efficiency, Machine
from twinstream.models.demand.attention_library import attention_library_bytes
from twinstream.models.demand.attention_limits import DeviceName, attention_names
from twinstream.models.demand.attention_shape import AttentionPass, AttentionShape
from twinstream.models.demand.work import ChunkWork
from twinstream.models.spec import ModelSpec
from twinstream.schedule.cost import Work
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.workload import Workload

Timer = Callable[[Callable[[], object]], float]

# Largest difference over largest value, from eager attention in float32: results are rounded to
# 2**-9 relative in bf16, a few times; float32 sums differ by their order.
_TOLERANCES = {"bfloat16": 2e-2, "float32": 1e-4}
_REDUCED_QUERIES = 192  # 64 modulo 128, where cuDNN has gone wrong
_REDUCED_PAST = 320
_REDUCED_SEQUENCES = 2
_REDUCED_KEY_HEADS = 2
_REPEATS = 10
# torch counts the whole of a block whose rest it does not split off, up to 1 MiB more, and rounds
# large ones to 2 MiB: of each of the eight buffers that a backward pass has at most.
_ROUNDING_BYTES = 8 * 2 * 2**20


class NoAttentionError(TwinstreamError):
    """No implementation is right on the device."""


@dataclass(frozen=True)
class AttentionCase:
    """One shape of a workload, and what the cost model says it amounts to."""

    shape: AttentionShape
    forward: Work
    backward: Work


@dataclass(frozen=True)
class Candidate:
    """What was found of one implementation; `refused` says why it cannot be chosen.

    `samples` have forward and backward of each case. `error` is the largest at the reduced size.
    `excess_bytes` of device memory are taken beyond what is declared, by the worst call.
    """

    name: str
    refused: str | None = None
    error: float | None = None
    samples: tuple[Sample, ...] = ()
    excess_bytes: int = 0

    @property
    def time_ns(self) -> float:
        return sum(sample.time_ns for sample in self.samples)


@dataclass(frozen=True)
class AttentionProbe:
    """All implementations, and the fastest of those not refused."""

    device: str
    best: Candidate
    candidates: tuple[Candidate, ...]

    def machine(self, machine: Machine, nominal_flop_per_s: float) -> Machine:
        """The profile with the best as its choice, and the rates of all that are right."""
        date = datetime.now(UTC).date().isoformat()
        source = f"probed {date} on {self.device}, torch {torch.__version__}"
        choice = AttentionChoice(name=self.best.name, kind="measured", source=source)
        efficiency = dict(machine.efficiency)
        for candidate in self.candidates:
            if candidate.refused is None:
                efficiency |= attention_curves(candidate.samples, nominal_flop_per_s, source)
        return machine.model_copy(update={"attention": choice, "efficiency": efficiency})


def attention_cases(spec: ModelSpec, workload: Workload) -> tuple[AttentionCase, ...]:
    """The attention of a step: of packed sequences one case, of slices the first and the last."""
    chunks = workload.chunks_per_sequence
    starts = dict.fromkeys((0, (chunks - 1) * workload.chunk_tokens))
    return tuple(_case(spec, workload, start) for start in starts)


def probe_attention(
    cases: Sequence[AttentionCase],
    device: DeviceName,
    *,
    names: Sequence[str] | None = None,
    allow_nondeterministic: bool = False,
    timer: Timer | None = None,
) -> AttentionProbe:
    """Try every implementation on every case.

    Args:
        cases: all of one dtype.
        device: of this machine.
        names: implementations to try; by default all.
        allow_nondeterministic: choose also among those that do not give the same bits twice.
        timer: of a call, in ns; by default the median, by CUDA events on `cuda`.

    Raises:
        NoAttentionError: none is right; the message says why of each.
    """
    timer = timer or (cuda_median_ns if device == "cuda" else median_ns)
    with torch.no_grad():
        found = tuple(
            _candidate(name, cases, device, timer, deterministic=not allow_nondeterministic)
            for name in (names or attention_names())
        )
    right = [candidate for candidate in found if candidate.refused is None]
    if not right:
        told = "; ".join(f"{candidate.name}: {candidate.refused}" for candidate in found)
        raise NoAttentionError(f"no attention implementation is right on this {device}: {told}")
    best = min(right, key=lambda candidate: candidate.time_ns)
    return AttentionProbe(_device_name(device), best, found)


def attention_curves(
    samples: Sequence[Sample], nominal_flop_per_s: float, source: str
) -> Iterator[tuple[str, Efficiency]]:
    """Efficiencies of forward and backward, as fractions of a nominal rate, by FLOPs a launch."""
    for unit in ("attention_forward", "attention_backward"):
        of_unit = [sample for sample in samples if sample.work.unit == unit]
        line = fit_line([s.work.flops for s in of_unit], [s.time_ns for s in of_unit])
        maximum, half = line.efficiency(nominal_flop_per_s)
        told = f"{source}, worst residual {line.residual:.0%}"
        work = of_unit[0].work
        yield (
            f"{unit}/{work.implementation}/{work.dtype}",
            Efficiency(max=maximum, half=half, of="flops", kind="measured", source=told),
        )


def cuda_median_ns(call: Callable[[], object]) -> float:
    """Median time of one call by CUDA events, after warm-ups, calls back to back."""
    for _ in range(3):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]  # type: ignore[no-untyped-call]
    for event in events[:-1]:
        event.record()
        call()
    events[-1].record()
    torch.cuda.synchronize()
    times = [before.elapsed_time(after) for before, after in pairwise(events)]
    return float(sorted(times)[_REPEATS // 2]) * 1e6


def _candidate(
    name: str, cases: Sequence[AttentionCase], device: DeviceName, timer: Timer, *,
    deterministic: bool,
) -> Candidate:  # fmt: skip
    implementation = attention_implementation(name)
    for case in cases:
        if reason := attention_reason(name, device, case.shape):
            return Candidate(name, refused=reason)
    if deterministic and not implementation.deterministic:
        return Candidate(name, refused="it is not deterministic")
    error = max(_error(name, reduced(case.shape), device) for case in cases)
    tolerance = _TOLERANCES[cases[0].shape.dtype]
    if not error <= tolerance:
        told = f"it is {error:.1e} off the reference at a reduced size, over {tolerance:.0e}"
        return Candidate(name, refused=told, error=error)
    samples: list[Sample] = []
    excess_bytes = 0
    for case in cases:
        trial = Trial(implementation, case.shape, torch.device(device))
        if reason := _fault(trial, name, case.shape, device, deterministic=deterministic):
            return Candidate(name, refused=reason, error=error)
        if device == "cuda":
            excess_bytes = max(excess_bytes, _excess_bytes(name, trial, case.shape))
        for work, call in ((case.forward, trial.forward), (case.backward, trial.backward)):
            samples.append(Sample(work.model_copy(update={"implementation": name}), timer(call)))
    return Candidate(name, error=error, samples=tuple(samples), excess_bytes=excess_bytes)


def _fault(
    trial: Trial, name: str, shape: AttentionShape, device: DeviceName, *, deterministic: bool
) -> str | None:
    """What is wrong at the size asked for, or None."""
    try:
        check_shape(name, shape, device)
    except AttentionCanaryError as error:
        return str(error)
    if deterministic and not trial.results().same_bits(trial.results()):
        return f"its results differ from run to run for {shape}"
    return None


def _excess_bytes(name: str, trial: Trial, shape: AttentionShape) -> int:
    """What the pass that takes most beyond what it declares takes so, but for rounding."""
    calls: dict[AttentionPass, Callable[[], object]] = {
        "forward": trial.forward, "backward": trial.backward,
    }  # fmt: skip
    over = [
        taken_bytes(call) - attention_library_bytes(name, of_pass, shape)
        for of_pass, call in calls.items()
    ]
    return max(over) if max(over) > _ROUNDING_BYTES else 0


def taken_bytes(call: Callable[[], object]) -> int:
    """What a call allocates on the CUDA device at most, beside what was there before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def reduced(shape: AttentionShape) -> AttentionShape:
    """A small shape of the same kind: as many query heads a key head, and slices stay slices."""
    key_heads = min(shape.num_kv_heads, _REDUCED_KEY_HEADS)
    lengths = _reduced_lengths(shape.lengths)
    queries = sum(lengths) or min(shape.num_queries, _REDUCED_QUERIES)
    return replace(
        shape,
        num_sequences=min(shape.num_sequences, _REDUCED_SEQUENCES),
        num_queries=queries,
        num_keys=queries + min(shape.num_past, _REDUCED_PAST),
        num_heads=shape.num_heads // shape.num_kv_heads * key_heads,
        num_kv_heads=key_heads,
        lengths=lengths,
    )


def _reduced_lengths(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """The shortest, the longest and one between, made short, and then still unequal."""
    if not lengths:
        return ()
    in_order = sorted(set(lengths))
    some = dict.fromkeys((in_order[-1], in_order[0], in_order[len(in_order) // 2]))
    return tuple(min(n, _REDUCED_QUERIES - i) for i, n in enumerate(some))


def _error(name: str, shape: AttentionShape, device: DeviceName) -> float:
    """The largest difference from eager attention in float32, over the largest value."""
    where = torch.device(device)
    trial = Trial(attention_implementation(name), shape, where)
    exact = replace(shape, dtype="float32")
    reference = Trial(attention_implementation("eager"), exact, where)
    for into, operand in (
        (reference.q, trial.q),
        (reference.kv, trial.kv),
        (reference.d_out, trial.d_out),
    ):
        into.copy_(operand)
    return largest_difference(trial.results(), reference.results())


def largest_difference(found: Results, expected: Results) -> float:
    """NaN where a result has one."""
    pairs = zip(found.by_name().values(), expected.by_name().values(), strict=True)
    errors = [float((a.float() - b).abs().max() / b.abs().max()) for a, b in pairs]
    return max(errors, key=lambda error: (error != error, error))


def _case(spec: ModelSpec, workload: Workload, start: int) -> AttentionCase:
    tokens, lengths = workload.chunk_tokens, workload.sequence_lengths
    queries = tokens if lengths else min(tokens, workload.seq_len)
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
        lengths=lengths,
    )
    return AttentionCase(shape, work.attention_forward(), work.attention_backward())


def _device_name(device: DeviceName) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"
