"""The links between processes of this machine, measured: each collective over sizes, on ranks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import accumulate
from math import inf
from statistics import median
from time import monotonic
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from twinstream.clusters.running.measured import measured_cluster_timeline
from twinstream.fidelity.ranks_fit import MeasuredRanks, exchange_times, measured_curves
from twinstream.hardware_profiles.clusters.curves import CollectiveCurve
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.collectives.fitting import fit_lines
from twinstream.hardware_profiles.schema import Machine, Number
from twinstream.models.presets import load_preset
from twinstream.schedule.analysis.comparison import by_rank
from twinstream.schedule.cluster.verify import require_safe
from twinstream.schedule.document import (
    Axis,
    Caps,
    Exchange,
    Mesh,
    RankClass,
    RankSchedule,
    Schedule,
)
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.ops import Communicate, Label, Mode, Op, Operand, Stream
from twinstream.schedule.tensors import DEVICE, HOST, Carried, Slot, Tensor
from twinstream.schedule.workload import MachineRef, Workload

if TYPE_CHECKING:
    from twinstream.executor.launch.rank_processes import RankProcesses
    from twinstream.executor.program.options import BackendName
    from twinstream.executor.ranks.rank_run import RankInputs
    from twinstream.schedule.cluster.projecting import RankPart

_LEAST_BYTES, _MOST_BYTES, _FACTOR = 2**12, 2**30, 4
_FEWEST_SIZES = 4
_PASSES = 12  # of a size; the first is not counted
_COPYING_SHARE = 0.5  # of a core, while bytes pass through sockets
_SUMS = ("library", "rank_order")


class RanksProbeError(TwinstreamError):
    """So few ranks, or so little time, that nothing can be measured."""


def probe_ranks(
    processes: RankProcesses, machine: Machine, budget_s: float, backend: BackendName,
    tell: Callable[[], object] = lambda: None,
) -> Cluster:  # fmt: skip
    """The profile of this machine as a cluster of one node, whose links are measured.

    Sizes rise fourfold from 4 KiB to 1 GiB; one that would exceed the budget, or a quarter of the
    memory that is free, is not begun. Of each size a curve has the median of 11 repeats. What is
    slower than a larger size has the larger one's time: another process was in the way.

    Args:
        processes: two or more, of which each is a rank.
        machine: the profile of one rank's device.
        budget_s: seconds for all sizes after the first; the four smallest are always measured.
        tell: called after each size.

    Raises:
        RanksProbeError: there are less than two ranks.
        RanksError: a rank ended, or kept others waiting; it says which.
    """
    num_ranks = processes.size
    if num_ranks < 2:
        raise RanksProbeError(f"--ranks {num_ranks}: links are between two ranks or more")
    runs = [_measured(processes, _LEAST_BYTES, backend)]  # for which processes start
    began, took_s, size = monotonic(), 0.0, _FACTOR * _LEAST_BYTES
    most_bytes = min(_MOST_BYTES, _free_bytes(backend) / (4 * num_ranks * 8))
    while len(runs) < _FEWEST_SIZES or (
        size <= most_bytes and monotonic() - began + _FACTOR * took_s <= budget_s
    ):
        at = monotonic()
        runs.append(_measured(processes, size, backend))
        took_s = monotonic() - at
        size *= _FACTOR
        tell()
    transport = "nccl" if backend == "cuda" else "gloo"
    told = (
        f"probed {datetime.now(UTC).date().isoformat()}, torch {version('torch')}, {transport}, "
        f"{_PASSES - 1} repeats, middle half within {_spread(runs):.0%} of the median"
    )
    curves = tuple(map(_risen, measured_curves(runs, told)))
    return _cluster(machine, num_ranks, curves, told)


def collectives_schedule(num_ranks: int, size_bytes: int) -> Schedule:
    """A pass in which all ranks do one collective of each kind after the other.

    Groups are the innermost prime factor of the ranks, that and the next, and so on to all ranks;
    those of one size exchange at the same time, as those of a training's mesh do. Messages go round
    the innermost. Of a collective the larger of what is given and taken has about `size_bytes`.
    """
    factors = _prime_factors(num_ranks)
    mesh = Mesh(
        axes=tuple(Axis(name=f"axis{at}", size=size) for at, size in enumerate(factors)),
        ranks_per_node=num_ranks,
    )
    whole = num_ranks * max(1, size_bytes // (4 * num_ranks)) * 4
    ops: list[Communicate] = []
    for at in reversed(range(len(factors))):
        axes = mesh.names[at:]
        ops += _of_group(axes, mesh, len(ops))
    return _schedule(mesh, _one_by_one(ops, _messages(mesh.names[-1])), whole)


def _of_group(axes: tuple[str, ...], mesh: Mesh, number: int) -> list[Communicate]:
    """Each writes what the next reads, so that nothing grows; versions are counted by op."""
    shard = f"shard{len(axes)}"

    def op(kind: str, sequence: int, *operands: Operand, sums: str = "library") -> Communicate:
        return Communicate.model_validate({
            "op_id": f"{kind}.{sums}.{len(axes)}", "collective": kind, "axes": axes,
            "stream": Stream(queue="exchange"), "sequence": sequence, "operands": operands,
            "reduction": sums, "label": Label(kind="probe"),
        })  # fmt: skip

    base = 3 * (number // 6)  # versions that groups before have made
    found = [op("all_to_all", 0, _use("given", 0), _use("taken", base + 1, "write"))]
    for at, sums in enumerate(_SUMS):
        found.append(
            op("all_reduce", 1 + 2 * at, _use("taken", base + 1 + at, "update"), sums=sums)
        )
        found.append(
            op("reduce_scatter", 2 + 2 * at, _use("taken", base + 2 + at),
               _use(shard, at + 1, "write"), sums=sums)
        )  # fmt: skip
    return [*found, op("all_gather", 5, _use(shard, 2), _use("whole", number // 6 + 1, "write"))]


def _messages(axis: str) -> list[Communicate]:
    """To the next rank, from the one before."""
    return [
        Communicate.model_validate({
            "op_id": kind, "stream": Stream(queue=kind), "collective": kind, "axes": (axis,),
            "shift": shift, "sequence": 0, "operands": (operand,), "label": Label(kind="probe"),
        })
        for kind, shift, operand in (
            ("send", 1, _use("taken", 1)),
            ("recv", -1, _use("taken", 1, "write").model_copy(update={"slot": "came"})),
        )
    ]  # fmt: skip


def _use(tensor: str, version: int, mode: Mode = "read") -> Operand:
    return Operand(name=mode, tensor=tensor, version=version, mode=mode, slot=tensor)


def _one_by_one(ops: list[Communicate], messages: list[Communicate]) -> tuple[Op, ...]:
    """Messages, both at once, begin after the first collective, and the next one after them."""
    first, then, *rest = ops
    return (
        first,
        *(op.model_copy(update={"waits": (first.op_id,)}) for op in messages),
        then.model_copy(update={"waits": tuple(op.op_id for op in messages)}),
        *rest,
    )


def _schedule(mesh: Mesh, ops: tuple[Op, ...], whole: int) -> Schedule:
    sizes = {"given": whole, "taken": whole, "whole": whole, "came": whole}
    for op in ops:
        if isinstance(op, Communicate) and op.collective == "all_gather":
            ranks = int(np.prod([mesh.length(axis) for axis in op.axes]))
            sizes[op.operands[0].tensor] = whole // ranks
    slots, end = [], 0
    for name, size in sizes.items():
        slots.append(Slot(slot_id=name, tier=DEVICE, offset_bytes=end, size_bytes=size))
        end += -(-size // 256) * 256
    reference = MachineRef(name="probe", content_hash="0")
    own = RankSchedule(
        tensors=tuple(
            Tensor(tensor_id=name, size_bytes=size, role="activation", dtype="float32",
                   shape=(size // 4,))
            for name, size in sizes.items() if name != "came"
        ),
        slots=(*slots, Slot(slot_id="host", tier=HOST, offset_bytes=0, size_bytes=256)),
        calls={}, ops=ops, carried=(Carried(tensor="given", slot="given"),), caps=Caps(),
        workload=Workload(seq_len=1, chunk_tokens=1, chunks_per_round=1, rounds_per_step=1),
        model=load_preset("tiny").ref(), recipe={}, model_flops=1, machine=reference,
        policy="probe",
    )  # fmt: skip
    names = [op.op_id for op in ops if op.stream.queue == "exchange"]
    order: list[tuple[tuple[str, str], ...]] = [(("all", name),) for name in names]
    order.insert(1, (("all", "send"), ("all", "recv")))
    return Schedule(
        mesh=mesh, classes=(RankClass(name="all", schedule="all", cells={}),),
        schedules={"all": own}, order=tuple(Exchange(sides=sides) for sides in order),
        model={}, layout={}, seq_len=1, global_batch=1, model_flops=1, machine=reference,
    )  # fmt: skip


def _inputs(part: RankPart) -> RankInputs:
    """What each rank gives: zeros."""
    import torch

    from twinstream.executor.program.host_work import HostWork
    from twinstream.executor.ranks.rank_run import RankInputs

    def nothing(*told: object) -> NoReturn:
        raise AssertionError("no op feeds or fetches")

    (size,) = (one.size_bytes for one in part.schedule.tensors if one.tensor_id == "given")
    return RankInputs(HostWork(nothing, nothing), {"given": torch.zeros(size, dtype=torch.uint8)})


def _measured(processes: RankProcesses, size: int, backend: BackendName) -> MeasuredRanks:
    from twinstream.executor.program.options import RunOptions

    schedule = collectives_schedule(processes.size, size)
    require_safe(schedule)
    options = RunOptions(backend, _PASSES, timed_passes=_PASSES, graphs="off")
    outcomes = processes.execute(schedule, _inputs, options)
    return by_rank(schedule, measured_cluster_timeline(schedule, outcomes, _PASSES))


def _spread(runs: list[MeasuredRanks]) -> float:
    """Half of what lies between the quartiles, relative to the median; median over all sizes."""
    found = []
    for by_size in exchange_times(runs).values():
        for times in by_size.values():
            low, middle, high = np.quantile(times, (0.25, 0.5, 0.75))
            found.append((high - low) / 2 / middle)
    return float(median(found))


def _risen(curve: CollectiveCurve) -> CollectiveCurve:
    """Let no size take longer than a larger one."""
    sizes, times = zip(*curve.points, strict=True)
    least = [*accumulate(reversed(times), min, initial=inf)][:0:-1]
    return curve.model_copy(update={"points": tuple(zip(sizes, least, strict=True))})


def _cluster(
    machine: Machine, num_ranks: int, curves: tuple[CollectiveCurve, ...], told: str
) -> Cluster:
    """For groups without a curve the link is the line of messages.

    Where latency hides the rate, it is taken to be ten times what the largest message reached.
    """
    (messages,) = (curve for curve in curves if curve.collective == "send_recv")
    size_bytes, time_ns = np.array(messages.points).T
    ((alpha_ns, beta_ns),) = fit_lines(size_bytes, time_ns, 1)
    byte_ns = max(beta_ns, float(time_ns[-1] / size_bytes[-1]) / 10)

    def number(value: float, why: str = "", kind: str = "fitted") -> Number:
        source = ": ".join(filter(None, (told, why)))
        return Number.model_validate({"value": value, "kind": kind, "source": source})

    shares = machine.device == "cpu"
    return Cluster(
        name="probed",
        description=f"{num_ranks} ranks on {machine.name}, their collectives measured",
        machine=machine.name, curves=curves,
        gpus_per_node=number(num_ranks, kind="measured"),
        most_nodes=number(1, "this machine", "measured"),
        node_bytes_per_s=number(1e9 / byte_ns, "messages on a line"),
        node_efficiency=number(1.0, "node_bytes_per_s is what is reached"),
        node_latency_ns=number(alpha_ns, "messages on a line"),
        collective_latency_ns=number(0.0, "it is in node_latency_ns"),
        compute_lost=number(
            _COPYING_SHARE if shares else 0.0,
            "both ends copy through the kernel" if shares else "not measured", "assumed",
        ),
    )  # fmt: skip


def _free_bytes(backend: BackendName) -> float:
    if backend == "cuda":
        return inf
    from twinstream.executor.memory.host_limits import host_limits

    free = host_limits().free_bytes
    return inf if free is None else free


def _prime_factors(number: int) -> list[int]:
    found, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return found[::-1]
