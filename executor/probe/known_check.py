"""Check a known GPU's profile in about 3 s: its links, a product and attention of one head size.

Links belong to hosts and the clock to a power limit, so that shipped curves keep their form and are
scaled by what is found here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import torch

from twinstream.executor.probe.chains import check_chain
from twinstream.executor.probe.cuda import matmul_load, sustained_rate
from twinstream.executor.probe.cuda_links import Copies, measure_copies
from twinstream.executor.probe.device import begin_device
from twinstream.executor.probe.process import DeviceProcess, JobFailed, JobRefused
from twinstream.executor.probe.tasks.task_samples import TaskSample, attention_samples
from twinstream.executor.probe.timing.device_timing import DeviceTimer
from twinstream.hardware_profiles.cost import work_time
from twinstream.hardware_profiles.curve_choice import curve_for, with_own_rates
from twinstream.hardware_profiles.link import D2H, DUPLEX, DUPLEX_SHARE, H2D
from twinstream.hardware_profiles.schema import ExpectedError, Machine, Number
from twinstream.models.kernel_costs.attention_libraries import DeviceName
from twinstream.schedule.cost import Work

_LIMIT_S, _LOAD_S, _PRODUCT_S = 60.0, 0.2, 1.0
# A product that is kept up is slower than those of steps, whose attention leaves power: an H200's
# 8192 cubed for 2 s was at 0.981 of the price that its probe's samples give.
_KEPT_UP = 0.981
_BELIEVED = (0.2, 3.0)  # of kernels' rates: beyond, what was measured was something else
_BELIEVED_LINKS = (0.05, 2.0)  # hosts have links of older generations, and fewer lanes
_MISFIT = 0.09  # of one shape of attention on its curve, worst of an H200: so little is left
# The most that two profiles, scaled so, were off on 15 steps of 8B and 15B of an H200, and on
# average (docs/benchmarks/gpu.md).
_MEAN_ERROR, _WORST_ERROR = 0.021, 0.029


@dataclass(frozen=True)
class Checked:
    """The results of a check: copies, FLOP/s of a product of `product_rows` cubed, attention."""

    copies: Copies
    product_flop_per_s: float
    product_rows: int
    attention: tuple[TaskSample, ...] = ()


def checked_machine(machine: Machine, head_dim: int | None, tell: Callable[[str], None]) -> Machine:
    """The profile scaled by what is measured on the GPU here; as it is where that breaks.

    Args:
        machine: of the GPU here; its `attention` is what is checked.
        head_dim: of the model; None leaves attention out.
        tell: takes a line on what was found.
    """
    name = machine.attention.name if machine.attention is not None else None
    job = partial(measured_check, attention=name, head_dim=head_dim)
    with DeviceProcess(partial(begin_device, "cuda")) as process:
        try:
            found = process.do(job, _LIMIT_S)
        except (JobRefused, JobFailed) as error:
            tell(f"{machine.name} could not be checked here, and is taken as it is: {error}")
            return machine
    checked, told = scaled(machine, found)
    tell(f"checked here: {told}")
    return checked


def measured_check(
    device: DeviceName,
    attention: str | None,
    head_dim: int | None,
    copies: Callable[[torch.device], Copies] = measure_copies,
    seconds: float = _PRODUCT_S,
) -> Checked:
    """Links both ways, a product under load, attention forward and backward of this head size."""
    where = torch.device(device)
    found = copies(where)
    load, flops = matmul_load(where)
    product = sustained_rate(DeviceTimer(where), load, flops, seconds)
    samples: list[TaskSample] = []
    if attention is not None and head_dim is not None:
        timer = DeviceTimer(where, load=load, load_s=min(_LOAD_S, seconds))
        chain = check_chain(attention, head_dim, is_small=where.type == "cpu")
        samples = list(attention_samples(chain, timer))
    rows = round((flops / 2) ** (1 / 3))
    return Checked(found, product.flop_per_s, rows, tuple(samples))


def scaled(machine: Machine, found: Checked) -> tuple[Machine, str]:
    """The profile, with links, products and attention at the rates found, and what changed."""
    where = f"checked here {datetime.now(UTC).date().isoformat()}"
    told: list[str] = []
    machine = _with_links(machine, found.copies, where, told)
    machine = _with_product(machine, found, where, told)
    for sample in found.attention:
        machine = _with_attention(machine, sample, where, told)
    error = machine.expected_error
    if error is None or error.mean > _MEAN_ERROR:
        error = ExpectedError(
            mean=_MEAN_ERROR, worst=_WORST_ERROR, kind="checked",
            source="what an H100's curves, scaled so, were off on 15 steps of an H200: "
            "docs/benchmarks/gpu.md",
        )  # fmt: skip
    else:
        error = error.model_copy(update={"kind": "checked"})
    return machine.model_copy(update={"expected_error": error}), ", ".join(told)


def _with_links(machine: Machine, copies: Copies, where: str, told: list[str]) -> Machine:
    (to, back), both = copies.alone_bytes_per_s, copies.duplex_bytes_per_s
    curves = dict(machine.efficiency)
    rates = {H2D: to, D2H: back, DUPLEX: both}
    if not all(_is_believed(r / machine.rate(f), _BELIEVED_LINKS) for f, r in rates.items()):
        told.append("links not believed")
        return machine
    for key, field, rate in (("h2d", H2D, to), ("d2h", D2H, back), ("duplex", DUPLEX, both)):
        told.append(_change(f"{key} {rate / 1e9:.1f} GB/s", rate / machine.rate(field)))
        update = {"max": min(1.5, rate / machine.number(field)), "half": 0.0, "kind": "measured",
                  "source": where}  # fmt: skip
        curves[key] = curves[key].model_copy(update=update)
    number = Number(value=copies.h2d_share, kind="measured", source=where)
    return machine.model_copy(update={"efficiency": curves, DUPLEX_SHARE: number})


def _with_product(machine: Machine, found: Checked, where: str, told: list[str]) -> Machine:
    """What the power limit sustains, scaled so that the product takes the time measured."""
    rows, rate = found.product_rows, found.product_flop_per_s
    flops, moved = 2 * rows**3, 3 * 2 * rows**2
    work = Work(unit="matmul", shape=(rows,) * 3, flops=flops, hbm_bytes=moved, launches=1)
    times = work_time(work, machine)
    faster = times.compute_ns / (flops / rate * 1e9 - times.launch_ns) / _KEPT_UP
    told.append(_change(f"products {rate / 1e12:.0f} TFLOP/s", faster))
    if not _is_believed(faster):
        return machine
    return _scaled_curve(machine, "sustained", faster, where)


def _with_attention(
    machine: Machine, sample: TaskSample, where: str, told: list[str]
) -> Machine:  # fmt: skip
    machine = with_own_rates(machine, sample.works)
    (work,) = sample.works
    times = work_time(work, machine)
    faster = times.compute_ns / (sample.time_ns - times.launch_ns)
    told.append(_change(work.unit.replace("_", " "), faster))
    chosen = curve_for(work, machine)
    if abs(faster - 1) <= _MISFIT or not _is_believed(faster):
        return machine
    return _scaled_curve(machine, chosen.key, faster, where)


def _scaled_curve(machine: Machine, key: str, faster: float, where: str) -> Machine:
    curve = machine.efficiency[key]
    source = f"{where}, x {faster:.3f}; {curve.source}"
    new = curve.model_copy(update={"max": min(1.5, curve.max * faster), "source": source})
    return machine.model_copy(update={"efficiency": {**machine.efficiency, key: new}})


def _is_believed(ratio: float, limits: tuple[float, float] = _BELIEVED) -> bool:
    return limits[0] <= ratio <= limits[1]  # false of what is no number


def _change(what: str, ratio: float) -> str:
    """
    >>> _change("h2d 55.1 GB/s", 1.05), _change("attention", 7.0)
    ('h2d 55.1 GB/s (+5.0 %)', 'attention (+600.0 %, not believed)')
    """
    doubt = "" if _is_believed(ratio, _BELIEVED_LINKS) else ", not believed"
    return f"{what} ({ratio - 1:+.1%}{doubt})".replace("%", " %")
