"""Tasks of a traced model as a probe times them: its own blocks, forward and backward."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import torch

from twinstream.executor.memory.host_limits import host_limits
from twinstream.executor.probe.tasks.chain_memory import ChainMemory, in_order
from twinstream.executor.probe.tasks.task_samples import TaskSample
from twinstream.executor.probe.timing.device_timing import DeviceTimer
from twinstream.executor.program.module_programs import ModulePrograms
from twinstream.executor.providers.registry import provider_of
from twinstream.models.providers.model import AnyModel
from twinstream.schedule.chain import Chain
from twinstream.schedule.cost import Work
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.sizes import gib

_REPEATS = 5
_NOT_ITS_OWN = ("optimizer_step",)  # a kernel of ours, which the probe of the machine times


class TooLargeToProbe(TwinstreamError):
    """A model's step is not held at once by the memory that is left."""


def module_samples(model: AnyModel, chain: Chain, device: torch.device) -> list[TaskSample]:
    """Time each kind of task of a chain, in its order; those of equal work are one kind.

    As in a run a CPU computes in one thread, and what is timed is not in its caches.

    Raises:
        TooLargeToProbe: all tensors of the chain are more than half of the memory that is left.
        TwinstreamError: the model's code cannot be built here.
    """
    needed = sum(tensor.size_bytes for tensor in chain.tensors if tensor.parent is None)
    left = _left_bytes(device)
    if left is not None and needed > left / 2:
        raise TooLargeToProbe(
            f"a step of '{model.name}' takes {gib(needed)} at once, and half of what is left is "
            f"{gib(round(left / 2))}: give a shorter --seq-len, or a config with fewer layers"
        )
    if device.type != "cpu":
        return list(_samples(model, chain, device, DeviceTimer(device).mean_ns))
    with ThreadPoolExecutor(1, initializer=lambda: torch.set_num_threads(1)) as pool:
        return pool.submit(lambda: list(_samples(model, chain, device, _core_ns))).result()


def _samples(
    model: AnyModel, chain: Chain, device: torch.device,
    time_of: Callable[[Callable[[], object]], float],
) -> Iterator[TaskSample]:  # fmt: skip
    memory = ChainMemory(chain, device, model)
    provider, programs = provider_of(model), ModulePrograms()
    known: set[tuple[Work, ...]] = set()
    for task in in_order(chain):
        call, kind = chain.calls[task.call], task.label.kind
        if kind in _NOT_ITS_OWN:
            continue
        kernel = provider.kernel(model, call.kernel, programs)
        run = kernel(memory.operands(task), call.attributes)
        with torch.no_grad():
            run()
            works = tuple(call.cost)
            if works and works not in known:
                known.add(works)
                work = chain.workload
                name = f"{kind}, {work.chunk_tokens // work.seq_len} x {work.seq_len} tokens"
                yield TaskSample(name, works, time_of(run))


def _core_ns(call: Callable[[], object]) -> float:
    """Return the median time that a call had a core, its operands in the caches as in a run."""
    times_ns = []
    for _ in range(_REPEATS):
        start_ns = time.thread_time_ns()
        call()
        times_ns.append(time.thread_time_ns() - start_ns)
    return median(times_ns)


def _left_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return host_limits().available_bytes
