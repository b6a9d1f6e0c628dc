"""A traced model's own blocks, timed as a run computes them, in a machine's profile.

The probe of a machine times kernels of ours. Other people's blocks are made of operations that it
never saw, whose bytes, FLOPs and launches cost something else.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import fmean

from rich.console import Group

from twinstream import api
from twinstream.fidelity.scoring import table_of
from twinstream.hardware_profiles.cost import PEAK_OF_DTYPE, cost_alone_ns
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.lowering.lower import lower
from twinstream.models.providers.model import AnyModel
from twinstream.planner.request import PlanRequest, TrainingStep
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.workload import Workload

_SHAPES = ((1, 2), (1, 1), (3, 1))  # sequences, and what their length is divided by
_MOST_WEIGHT = 15  # of the task that takes longest, beside one that takes no time
_SHORTEST = 32  # tokens of a sequence


class ModelProbeError(TwinstreamError):
    """A model whose blocks cannot be timed, or whose times no profile gives."""


@dataclass(frozen=True)
class TimedTask:
    """A kind of task of the model: how long it took, and by the profile before and after, ns."""

    name: str
    measured_ns: float
    before_ns: float
    after_ns: float


@dataclass(frozen=True)
class ModelProbe:
    """The profile for a model, and its tasks by both profiles."""

    machine: Machine
    tasks: tuple[TimedTask, ...]

    def error(self, time_of: Callable[[TimedTask], float]) -> float:
        """The mean of |predicted / measured - 1| over the tasks."""
        return fmean(abs(time_of(task) / task.measured_ns - 1.0) for task in self.tasks)


def probe_model(
    model: AnyModel, machine: Machine, seq_len: int, backend: str = "auto",
    on_shape: Callable[[], object] = lambda: None,
) -> ModelProbe:  # fmt: skip
    """Time the tasks of short steps of a model, and fit the curves of its units to them.

    Three chunks of different size and length tell what grows with tokens, and with their square.

    Args:
        machine: its profile, whose other numbers stay.
        seq_len: tokens of the sequences that will be trained on.
        on_shape: is called after each of the steps, `num_shapes()` times.

    Raises:
        TwinstreamError: there is no torch, or the model does not fit; it has no code of its own.
    """
    if model.own_code is None:
        raise ModelProbeError(
            f"'{model.name}' is computed by kernels of twinstream's, which `twinstream probe` "
            "times without --model; --model is for other models' own code"
        )
    if seq_len < 2 * _SHORTEST:
        raise ModelProbeError(f"--seq-len {seq_len} is too short: give at least {2 * _SHORTEST}")
    api.require_torch()
    import torch

    from twinstream.executor.probe.tasks.curves import Ceilings, fit_curves
    from twinstream.executor.probe.tasks.module_samples import module_samples
    from twinstream.executor.run.execute import choose_backend

    device, samples = torch.device(choose_backend(backend)), []
    for sequences, divisor in _SHAPES:
        length = seq_len // divisor
        tokens = sequences * length
        request = PlanRequest.of(model, machine, step=TrainingStep(length, tokens, tokens, 1))
        work = Workload(seq_len=length, chunk_tokens=tokens, chunks_per_round=1, rounds_per_step=1)
        chain = lower(model, work, request.recipe)
        timed, pace = module_samples(model, chain, device), _pace(machine, device.type)
        samples += [replace(sample, time_ns=pace * sample.time_ns) for sample in timed]
        on_shape()
    ceilings = Ceilings(
        machine.number(PEAK_OF_DTYPE[model.dtype]), machine.number("hbm_bytes_per_s"),
        machine.number("hbm_bytes_per_s"), machine.number("launch_latency_ns"),
    )  # fmt: skip
    source = f"own blocks of {model.name}, timed {datetime.now(UTC).date().isoformat()}"
    longest = max(sample.time_ns for sample in samples)
    weighed = [s for s in samples for _ in range(1 + round(_MOST_WEIGHT * s.time_ns / longest))]
    fit = fit_curves(weighed, ceilings, source, attention_starts=machine.device == "cpu")
    after = machine.model_copy(
        update={
            "name": f"{machine.name}-{model.name}",
            "description": f"{machine.description} For {model.name}, whose own blocks were timed.",
            "efficiency": {**machine.efficiency, **fit.curves},
        }
    )
    tasks = [
        TimedTask(s.name, s.time_ns, cost_alone_ns(s.works, machine), cost_alone_ns(s.works, after))
        for s in samples
    ]
    return ModelProbe(after, tuple(tasks))


def _pace(machine: Machine, kind: str) -> float:
    """The speed of a CPU now beside that of its probe: what else runs changes clock and caches."""
    from twinstream.executor.probe.cpu import cpu_pace

    return cpu_pace(machine) if kind == "cpu" else 1.0


def num_shapes() -> int:
    """How many steps `probe_model` runs."""
    return len(_SHAPES)


def model_probe_table(found: ModelProbe) -> Group:
    """Each task as timed, and by both profiles."""
    lines = [
        (
            task.name,
            f"{task.measured_ns / 1e6:.2f}",
            f"{task.before_ns / task.measured_ns - 1:+.0%}",
            f"{task.after_ns / task.measured_ns - 1:+.0%}",
        )
        for task in found.tasks
    ]
    table = table_of(("task",), ("ms", "by the machine's profile", "by this one"), lines)
    before, after = found.error(lambda t: t.before_ns), found.error(lambda t: t.after_ns)
    return Group(
        f"{found.machine.name}: tasks of the model's own code",
        table,
        f"Mean error of a task: {before:.0%} by the machine's profile, {after:.0%} by this one.",
    )
