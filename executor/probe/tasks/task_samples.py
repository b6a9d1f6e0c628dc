"""Time the kernels of a task chain as a run calls them, each on what those before it computed."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from twinstream.executor.kernels.attention.registry import attention_implementation
from twinstream.executor.kernels.attention.trial import AttentionTrial
from twinstream.executor.kernels.operand import DTYPES
from twinstream.executor.kernels.registry import registered_kernel, vector_ops
from twinstream.executor.kernels.vector.vector_ops import VectorOps
from twinstream.executor.probe.tasks.chain_memory import ChainMemory, in_order
from twinstream.executor.probe.tasks.sample_log import SampleLog
from twinstream.executor.probe.timing.device_timing import DeviceTimer, Timing
from twinstream.executor.run.device_state import DeviceState
from twinstream.models.kernel_costs.scratch.block_sizes import attention_shape
from twinstream.schedule.chain import Chain, Task
from twinstream.schedule.cost import Work
from twinstream.schedule.ops import KernelCall

_PLACE = re.compile(r"@(\d+)")  # in a call's id: where in its sequence the chunk begins
_GROUPED = "grouped_matmul"  # begins the units of products of experts' rows


@dataclass(frozen=True)
class TaskSample:
    """Measured time of one kernel call, what it amounts to, and at what clock it was taken."""

    name: str
    works: tuple[Work, ...]
    time_ns: float
    state: DeviceState | None = None


def best_matmul_flop_per_s(samples: Sequence[TaskSample]) -> float:
    """The best rate among the products measured alone, FLOP/s."""
    return max(
        work.flops / sample.time_ns * 1e9
        for sample in samples
        if len(sample.works) == 1 and (work := sample.works[0]).unit == "matmul"
    )


def listed_samples(
    chain: Chain, *, every_place: bool = False
) -> Iterator[tuple[str, tuple[Work, ...]]]:
    """Name and work of each sample of a chain, in the order in which a probe takes them.

    Args:
        every_place: also those of a sequence's slices between its first and its last, which a probe
            leaves out: on an H200's samples the curves without them predict steps as well.
    """
    skipped = frozenset() if every_place else _between(chain)
    for name, work in _distinct_matmuls(chain):
        yield name, (work,)
    for _, works in _attentions(chain, skipped):
        for name, work in works.items():
            yield name, (work,)
    for task in _distinct_tasks(chain, skipped):
        yield _task_name(chain, task), chain.calls[task.call].cost


def task_samples(
    chain: Chain, timer: DeviceTimer, log: SampleLog | None = None
) -> Iterator[TaskSample]:
    """Every distinct call of a chain's first round and of its recomputes that the log lacks.

    The chain should have one layer: its tensors are all on the device at once. Tasks run in the
    chain's order, so that kernels are timed on activations and gradients, not on constants.
    """
    log = log or SampleLog()
    skipped = _between(chain)
    calls = [chain.calls[task.call] for task in _distinct_tasks(chain, skipped)]
    if all(log.knows(call.kernel, call.cost) for call in calls):
        yield from _known_tasks(chain, log)
        return
    memory = ChainMemory(chain, timer.device)
    for task in in_order(chain):
        call = chain.calls[task.call]
        run = registered_kernel(call.kernel)(memory.operands(task), call.attributes)
        name = _task_name(chain, task)
        with torch.no_grad():
            run()
            if task.call in skipped:
                continue
            yield from _taken(log, name, call.kernel, call.cost, partial(timer.timed, run))


def _known_tasks(chain: Chain, log: SampleLog) -> Iterator[TaskSample]:
    """Of a chain whose every call is known already: nothing of it has to run."""

    def measure() -> Timing:
        raise AssertionError("the log knows it")

    for task in _distinct_tasks(chain, _between(chain)):
        call = chain.calls[task.call]
        yield from _taken(log, _task_name(chain, task), call.kernel, call.cost, measure)


def _taken(
    log: SampleLog, name: str, kernel: str, works: tuple[Work, ...], measure: Callable[[], Timing]
) -> Iterator[TaskSample]:
    """The sample, unless equal work was one already."""
    if (timing := log.take(name, kernel, works, measure)) is not None:
        yield TaskSample(name, works, timing.time_ns, timing.state)


def matmul_samples(
    chain: Chain, timer: DeviceTimer, log: SampleLog | None = None
) -> Iterator[TaskSample]:
    """Each distinct matrix product of the chain's calls alone, once with random operands."""
    log = log or SampleLog()
    for name, work in _distinct_matmuls(chain):
        yield from _taken(log, name, "matmul", (work,), partial(_matmul_timing, work, timer))


def grouped_samples(
    chain: Chain, timer: DeviceTimer, log: SampleLog | None = None
) -> Iterator[TaskSample]:
    """Each distinct product of experts' rows alone; all experts have as many, so that with rows in
    whole tiles none of a tile is empty, as pricing adds it."""
    log = log or SampleLog()
    for name, work, vector in _distinct_grouped(chain):
        measure = partial(_grouped_timing, work, vector_ops(vector), timer)
        yield from _taken(log, name, vector, (work,), measure)


def attention_samples(
    chain: Chain, timer: DeviceTimer, log: SampleLog | None = None
) -> Iterator[TaskSample]:
    """Attention alone, forward and backward, for each distinct place of a chunk."""
    log = log or SampleLog()
    for call, works in _attentions(chain, _between(chain)):
        attention = str(call.attributes["attention"])
        implementation = attention_implementation(attention)
        shape = attention_shape(call.attributes)
        keys = next(iter(works.values())).shape[1]
        trial = AttentionTrial(implementation, shape, timer.device, seed=keys)
        with torch.no_grad():
            for (name, work), run in zip(
                works.items(), (trial.forward, trial.backward), strict=True
            ):
                yield from _taken(log, name, attention, (work,), partial(timer.timed, run))


def _task_name(chain: Chain, task: Task) -> str:
    work = chain.workload
    return f"{chain.model.name} S{work.seq_len}/{work.chunk_tokens} {task.call}"


def _between(chain: Chain) -> frozenset[str]:
    """Calls at places of a sequence's slices between its first and its last."""
    starts = {call: int(found[1]) for call in chain.calls if (found := _PLACE.search(call))}
    ends = {min(starts.values(), default=0), max(starts.values(), default=0)}
    return frozenset(call for call, start in starts.items() if start not in ends)


def _distinct_tasks(chain: Chain, skipped: frozenset[str]) -> Iterator[Task]:
    seen = {*skipped}
    for task in in_order(chain):
        if task.call not in seen:
            seen.add(task.call)
            yield task


def _distinct_matmuls(chain: Chain) -> Iterator[tuple[str, Work]]:
    seen: set[tuple[tuple[int, ...], bool]] = set()
    for call in chain.calls.values():
        for work in call.cost:
            if work.unit != "matmul" or (key := (work.shape, _accumulates(work))) in seen:
                continue
            seen.add(key)
            one = {
                "flops": work.flops // work.launches,
                "hbm_bytes": work.hbm_bytes // work.launches,
                "launches": 1,
            }
            name = f"matmul {'x'.join(map(str, work.shape))}{'+=' * _accumulates(work)}"
            yield name, work.model_copy(update=one)


def listed_grouped(chain: Chain) -> Iterator[tuple[str, tuple[Work, ...]]]:
    """List kernel and work of the samples that `grouped_samples` takes, without timing them."""
    for name, work, _ in _distinct_grouped(chain):
        yield name, (work,)


def _distinct_grouped(chain: Chain) -> Iterator[tuple[str, Work, str]]:
    """Name, work and vector kernels of products of experts' rows, as if rows divided evenly."""
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for call in chain.calls.values():
        for work in call.cost:
            if not work.unit.startswith(_GROUPED) or (key := (work.unit, work.shape)) in seen:
                continue
            seen.add(key)
            item, count = DTYPES[work.dtype].itemsize, work.shape[-1]
            if work.unit == _GROUPED:
                each, n, k, _ = work.shape
                moved = count * (each * (k + n) + n * k)
            else:
                n, k, each, _ = work.shape
                moved = count * (each * (k + n) + 2 * n * k)
            alone = {"flops": 2 * count * each * n * k, "hbm_bytes": moved * item}
            name = f"{work.unit} {'x'.join(map(str, work.shape))}"
            yield name, work.model_copy(update=alone), call.kernel.partition("/")[2]


def _attentions(
    chain: Chain, skipped: frozenset[str]
) -> Iterator[tuple[KernelCall, dict[str, Work]]]:
    """Forward and backward of each place's attention, by the names of their samples."""
    for call_id, call in chain.calls.items():
        if call_id in skipped:
            continue
        works = [work for work in call.cost if work.unit == "attention_backward"]
        if not call.kernel.startswith("block_backward/") or len(works) != 1:
            continue
        (backward,) = works
        queries, keys, heads, head_dim, sequences = backward.shape
        found = {}
        for unit, flops in (
            ("attention_forward", backward.flops * 4 // 10),
            ("attention_backward", backward.flops),
        ):
            place = f"{queries}/{keys}x{sequences} {heads}x{head_dim}"
            name = f"{unit} {call.attributes['attention']} {place}"
            found[name] = backward.model_copy(update={"unit": unit, "flops": flops})
        yield call, found


def _accumulates(work: Work) -> bool:
    """Whether the product is added to what is there: its result is read as well as written."""
    m, n, k = work.shape
    moved = work.hbm_bytes // work.launches // DTYPES[work.dtype].itemsize
    return moved > m * k + k * n + m * n


def _grouped_timing(work: Work, vector: VectorOps, timer: DeviceTimer) -> Timing:
    device, dtype, count = timer.device, DTYPES[work.dtype], work.shape[-1]
    generator = torch.Generator(device).manual_seed(sum(work.shape))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    is_gradient = work.unit != _GROUPED
    n, k, each = work.shape[:3] if is_gradient else (*work.shape[1:3], work.shape[0])
    ends = torch.arange(1, count + 1, dtype=torch.int32, device=device) * each
    x, y = random(count * each, k), random(count * each, n)
    matrices = random(count, n, k)
    if is_gradient:
        matrices.zero_()
        return timer.timed(lambda: vector.add_grouped_gradient(matrices, y, x, ends, "update"))
    columns = matrices.transpose(1, 2)
    return timer.timed(lambda: vector.grouped_matmul(x, columns, ends, y))


def _matmul_timing(work: Work, timer: DeviceTimer) -> Timing:
    m, n, k = work.shape
    dtype, device = DTYPES[work.dtype], timer.device
    generator = torch.Generator(device).manual_seed(m + n + k)

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator, dtype=dtype, device=device)

    out = torch.empty(m, n, dtype=dtype, device=device)
    if not _accumulates(work):
        x, weight = random(m, k), random(n, k)
        return timer.timed(lambda: torch.mm(x, weight.t(), out=out))
    y, x = random(k, m), random(k, n)
    out.zero_()
    return timer.timed(lambda: torch.addmm(out, y.t(), x, out=out))
