"""The whole path in two minutes: probe this machine, plan, predict, run, compare, calibrate."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from twinstream import api
from twinstream.demo_loop import Loop, Trial, calibrated, loop_rows
from twinstream.hardware_profiles.loader import load_machine, save_machine
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.metrics import copied_bytes, executed_flops, summarize
from twinstream.models.spec import ModelSpec
from twinstream.planner.infeasible import InfeasiblePlan, Shortage
from twinstream.planner.planner import Planner
from twinstream.planner.request import DEFAULT_POLICY, PlanRequest, TrainingStep, caps_of
from twinstream.run_settings import RunSettings
from twinstream.schedule.analysis.comparison import Comparison, compare
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import write_document
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE, HOST
from twinstream.simulator.replay import steady_state

ALL_ON_DEVICE, WITHIN_CAPS, OTHER_CAPS = "all on the device", "within the caps", "other caps"

# What a phase does and how many steps it has -> a block that shows it, and counts the steps.
Progress = Callable[[str, int | None], AbstractContextManager[Callable[[], None]]]

_DEVICE_SHARE = 8  # of what lies between the least that would do and everything resident
_LOOSER_SHARE = 2
_HOST_SHARES = (2, 4, 8)
_HEAD_DIM = 32


class DemoError(TwinstreamError):
    """The demo cannot run as asked."""


@dataclass(frozen=True)
class DemoSettings:
    """Where the demo runs and how large its model is; without `machine` the CPU is probed.

    A sequence is two chunks, a round two sequences, a step two rounds.
    """

    out: Path = Path("out/demo")
    backend: str = "cpu"
    machine: str | None = None
    num_steps: int = 6
    num_layers: int = 6
    d_model: int = 256
    seq_len: int = 256

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(
            name="demo", num_layers=self.num_layers, d_model=self.d_model,
            num_heads=self.d_model // _HEAD_DIM, num_kv_heads=self.d_model // (2 * _HEAD_DIM),
            head_dim=_HEAD_DIM, d_ff=3 * self.d_model, vocab_size=256, dtype="float32",
        )  # fmt: skip

    @property
    def step(self) -> TrainingStep:
        return TrainingStep(
            seq_len=self.seq_len,
            tokens_per_step=4 * self.seq_len,
            chunk_tokens=self.seq_len // 2,
            chunks_per_round=4,
        )


@dataclass(frozen=True)
class Demo:
    """The same training three times: all on the device, within caps that force everything, and,
    once the profile is calibrated with these two runs, within other caps by another policy."""

    machine: Machine
    resident: Trial
    capped: Trial
    other: Trial
    loop: Loop
    comparison: Comparison
    same_losses: bool
    same_state: bool
    files: tuple[Path, ...]


def run_demo(settings: DemoSettings, progress: Progress) -> Demo:
    """Run the demo and write the capped schedule and its two timelines into `settings.out`.

    Raises:
        DemoError: CUDA without a machine, or a folder that cannot be written.
        TwinstreamError: as `api.plan` and `api.execute`.
    """
    _make_folder(settings.out)
    machine = _machine(settings, progress)
    planner = Planner(steady_state)
    request = PlanRequest.of(settings.spec, machine, step=settings.step)
    with progress("planning", None):
        resident = planner.plan(replace(request, policy="resident"))
        capped = plan_within_tight_caps(planner, request, resident)
    trials = {
        ALL_ON_DEVICE: _trial(settings, machine, resident, progress),
        WITHIN_CAPS: _trial(settings, machine, capped, progress),
    }
    with progress("calibrating with these runs", None):
        after, fit = calibrated(machine, list(trials.values()))
        seen = tuple(trials)
        other = plan_within_looser_caps(planner, replace(request, machine=after), resident)
    trials[OTHER_CAPS] = _trial(settings, machine, other, progress)
    loop = Loop(fit, loop_rows(trials, after, seen))
    runs = [trial.run for trial in trials.values()]
    tight = trials[WITHIN_CAPS]
    return Demo(
        machine=machine,
        resident=trials[ALL_ON_DEVICE],
        capped=tight,
        other=trials[OTHER_CAPS],
        loop=loop,
        comparison=compare(capped, tight.predicted, tight.run.timeline),
        same_losses=all(run.losses == runs[0].losses for run in runs),
        same_state=all(_same_state(runs[0], run) for run in runs),
        files=_write(settings.out, {"machine": machine, "calibrated": after}, tight),
    )


def plan_within_looser_caps(planner: Planner, request: PlanRequest, resident: Schedule) -> Schedule:
    """By `streaming`, with half of what lies between the least that would do and everything."""
    device_bytes = _device_cap(planner, request, resident, _LOOSER_SHARE)
    return planner.plan(_within(request, device_bytes, None, "streaming"))


def plan_within_tight_caps(planner: Planner, request: PlanRequest, resident: Schedule) -> Schedule:
    """A schedule within caps so small that it offloads and recomputes.

    The device cap lies an eighth of the way from the least that would do to all that `resident`
    takes; the host cap so near the least that would do then that something is recomputed. What
    would do is asked of `streaming`, which answers fast.
    """
    device_bytes = _device_cap(planner, request, resident, _DEVICE_SHARE)
    roomy = planner.plan(_within(request, device_bytes, None, "streaming"))
    most_host = arena_bytes(roomy.only, HOST)
    least_host = _shortage(
        planner, _within(request, device_bytes, 0, "streaming")
    ).enough_host_bytes
    assert least_host is not None, "without a host cap this device cap does"
    host_caps = [least_host + (most_host - least_host) // share for share in _HOST_SHARES]
    for host_bytes in (*host_caps, least_host):
        schedule = planner.plan(_within(request, device_bytes, host_bytes, DEFAULT_POLICY))
        if executed_flops(schedule.only)[1] and copied_bytes(schedule.only).get("h2d"):
            return schedule
    raise DemoError("no caps make the planner offload and recompute this model; make it larger")


def _device_cap(planner: Planner, request: PlanRequest, resident: Schedule, share: int) -> int:
    """The least that would do, and one part in `share` of what lies between it and everything."""
    least = _shortage(planner, _within(request, 0, None, "streaming")).enough_device_bytes
    assert least is not None, "without a host cap some device cap does"
    most = arena_bytes(resident.only, DEVICE) + resident.caps.outside_arena_bytes
    return least + (most - least) // share


def _within(
    request: PlanRequest, device_bytes: int, host_bytes: int | None, policy: str
) -> PlanRequest:
    caps = caps_of(request.machine, device_bytes, host_bytes)
    return replace(request, caps=caps, policy=policy)


def _shortage(planner: Planner, request: PlanRequest) -> Shortage:
    """What would do where these caps do not."""
    try:
        planner.plan(request)
    except InfeasiblePlan as error:
        return error.shortage
    raise AssertionError("a plan in no memory at all")


def _machine(settings: DemoSettings, progress: Progress) -> Machine:
    if settings.machine is not None:
        return load_machine(settings.machine)
    if settings.backend != "cpu":
        raise DemoError(
            f"only the CPU is probed; with --backend {settings.backend} give the device's "
            "profile too: --machine NAME|FILE"
        )
    with progress("measuring this machine", None):
        return api.probe()


def _trial(
    settings: DemoSettings, machine: Machine, schedule: Schedule, progress: Progress
) -> Trial:
    predicted = api.simulate(schedule, machine)
    with progress(f"training, policy {schedule.policy}", settings.num_steps) as advance:
        run = api.execute(
            schedule,
            RunSettings(settings.backend, settings.num_steps, on_loss=lambda loss: advance()),
        )
    return Trial(
        schedule=schedule,
        predicted=predicted,
        run=run,
        predicted_summary=summarize(schedule, predicted, machine),
        measured_summary=summarize(schedule, run.timeline, machine),
    )


def _same_state(one: api.Run, other: api.Run) -> bool:
    """Whether all parameters and optimizer states are equal bit by bit."""
    import torch

    if one.state.keys() != other.state.keys():
        return False
    return all(torch.equal(flat, other.state[name]) for name, flat in one.state.items())


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(f"cannot make the folder {folder}: {error.strerror or error}") from None


def _write(folder: Path, machines: Mapping[str, Machine], trial: Trial) -> tuple[Path, ...]:
    documents = {
        "schedule.json": trial.schedule,
        "predicted.json": trial.predicted,
        "measured.json": trial.run.timeline,
    }
    for name, document in documents.items():
        write_document(document, folder / name)
    for name, machine in machines.items():
        save_machine(machine, folder / f"{name}.toml")
    return tuple(folder / name for name in (*documents, *(f"{name}.toml" for name in machines)))
