"""A device that answers at once, and a clock that only its answers move."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from benchmarks.gpu.device import requests
from benchmarks.gpu.jobs.campaign import Plan, campaign_of
from benchmarks.gpu.jobs.results import AttentionChecked, CheckFound, SampleRatio, Where
from benchmarks.gpu.jobs.store import Store
from benchmarks.gpu.run.budget import Budget
from benchmarks.gpu.run.engine import Engine
from benchmarks.gpu.run.settings import Settings
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.files import read_document
from twinstream.schedule.timeline import DeviceMemory, HostCost, PassSpans, Provenance, RankTimeline

_AnswerT = TypeVar("_AnswerT")
WHERE = Where(
    backend="cpu", device="stand-in", driver="0", torch="0", commit="abc", date="2026-01-01",
    command="test",
)  # fmt: skip
MACHINE = load_machine("cpu")


@dataclass
class Clock:
    """Seconds, moved by hand."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class FakeDevice:
    """Answers every request after a stated time; `instead` raises for requests of a kind."""

    clock: Clock
    seconds: float = 1.0
    machine: Machine = MACHINE
    instead: Mapping[type, Callable[[], Exception]] = field(default_factory=dict)
    asked: list[requests.Request] = field(default_factory=list)
    limits_s: list[float] = field(default_factory=list)

    def ask(self, request: requests.Request, kind: type[_AnswerT], limit_s: float) -> _AnswerT:
        self.asked.append(request)
        self.limits_s.append(limit_s)
        self.clock.now_s += self.seconds
        if type(request) in self.instead:
            raise self.instead[type(request)]()
        answer = self._answer(request)
        assert isinstance(answer, kind)
        return answer

    def close(self) -> None:
        pass

    def names(self) -> list[str]:
        return [type(request).__name__ for request in self.asked]

    def _answer(self, request: requests.Request) -> requests.Answer:
        match request:
            case requests.ProbeDevice():
                sample = SampleRatio(name="mm", time_ns=1e3, ratio=1.02)
                return requests.ProbedDevice(self.machine, (("h2d", 1024, 3.5),), (sample,))
            case requests.NoteFacts():
                return requests.Facts({"machine": "a stand-in"})
            case requests.CheckDevice():
                checked = AttentionChecked(name="a", seq_len=8, num_sequences=1, head_dim=4,
                                           refused="there is none")  # fmt: skip
                return CheckFound(attention=(checked,))
            case requests.RunSchedules():
                return requests.RanSchedules(
                    tuple(_run_of(read_document(RankSchedule, path)) for path, _ in request.runs)
                )
            case requests.RunPeer():
                return requests.RanPeer(0.5, 0.25, 5.5, None)
            case _:
                raise AssertionError(f"nobody asks a stand-in for {request}")


def _run_of(schedule: RankSchedule) -> requests.ScheduleRun:
    """A step takes 10 ms and 1 ms a round; every op a microsecond, one after the other."""
    rounds = schedule.workload.rounds_per_step
    count = len(schedule.ops)
    spans = PassSpans(
        start_ns=tuple(1000 * i for i in range(count)),
        end_ns=tuple(1000 * (i + 1) for i in range(count)),
    )
    provenance = Provenance(
        kind="measured",
        where="stand-in",
        host_cost=HostCost(
            num_passes=1, ns_per_op=2500.0, ns_per_call={}, calls_per_pass={},
            waited_ns_per_pass=0.0,
        ),
        device_memory=DeviceMemory(
            arena_bytes=2**29, cap_bytes=None, reserve_bytes=0, before_bytes=0, warm_bytes=2**29,
            peak_bytes=2**30, libraries_bytes=0,
        ),
    )  # fmt: skip
    timeline = RankTimeline(
        op_ids=tuple(op.op_id for op in schedule.ops), passes=(spans,), cold=spans,
        step_ns=1e7 + 1e6 * rounds, provenance=provenance,
    )  # fmt: skip
    return requests.ScheduleRun(timeline, (5.5, 5.4))


def settings(**changes: object) -> Settings:
    given: dict[str, object] = {
        "backend": "cpu", "size": "tiny", "stages": ("probe", "cells", "peers"),
        "host_bytes": None, "num_jobs": 0, "tests": (), "vector": "auto", "attention": "auto",
        "presets": ("tiny",),
    }  # fmt: skip
    return Settings(**(given | changes))  # type: ignore[arg-type]


def engine(
    store: Store, device: FakeDevice, total_s: float = 1000.0, plan: Plan | None = None,
    **changes: object,
) -> Engine:  # fmt: skip
    """An engine on the device's clock; `told` of its messages is its `tell`'s list."""
    budget = Budget(total_s, device.clock)
    told: list[str] = []
    made = Engine(
        settings(**changes), plan or campaign_of("tiny", None), store, device, budget, told.append
    )
    made.__dict__["told"] = told
    return made
