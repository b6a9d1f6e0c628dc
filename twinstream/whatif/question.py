"""What a what-if is about: a plan, and properties of it that money can change."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isinf

from twinstream import api
from twinstream.hardware_profiles.cost import PEAK_OF_DTYPE
from twinstream.hardware_profiles.link import D2H, DUPLEX, H2D, LINK_FIELDS
from twinstream.hardware_profiles.overrides import override
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.metrics import Summary, summarize
from twinstream.models.spec import ModelSpec
from twinstream.planner.choices import OPEN, Choices
from twinstream.planner.judge import Judged
from twinstream.planner.known import Asked, fastest_of, fits, plan_knowing
from twinstream.planner.plan import optimizer_place
from twinstream.planner.search.chunking import TrainingStep
from twinstream.planner.step_plan import with_tokens
from twinstream.schedule.document import Caps, Schedule
from twinstream.simulator.replay import steady_state

_GIB, _GB = 2**30, 1e9


@dataclass(frozen=True)
class Question:
    """A step to plan on a machine within caps, by a policy; its tokens per step are fixed."""

    spec: ModelSpec
    machine: Machine
    step: TrainingStep
    caps: Caps
    policy: str
    choices: Choices = OPEN

    def planned(
        self, known: Sequence[Schedule] = (), *, name_caps: bool = True
    ) -> tuple[Schedule, Summary]:
        """A plan, or a known one that is faster on the machine, and what it yields there.

        Raises:
            TwinstreamError: as `plan_knowing`.
        """
        schedule = plan_knowing(self._asked, known, name_caps=name_caps)
        return schedule, self._summary(schedule)

    def quickly(self) -> "Question":
        """The same with quick effort, which only `optimal` has."""
        if self.policy != "optimal":
            return self
        return replace(self, choices=replace(self.choices, effort="quick"))

    def best_of(self, planned: Schedule, known: Sequence[Schedule]) -> tuple[Schedule, Summary]:
        """The fastest of a plan of this question and of known ones, and what it yields."""
        best = fastest_of(planned, known, self._asked)
        return best, self._summary(best)

    def tokens_per_s(self, schedule: Schedule) -> float:
        """What a plan, made for whatever machine, yields on this question's."""
        return schedule.workload.tokens_per_step / (self._judge(schedule).step_ns / 1e9)

    def fits(self, schedule: Schedule) -> bool:
        """Whether a plan, made within whatever caps, fits this question's."""
        return fits(schedule, self.caps)

    @property
    def _asked(self) -> Asked:
        return Asked(
            self.spec, self.step, self.machine, self.caps, self.policy, self._judge, self.choices
        )

    def _judge(self, schedule: Schedule) -> Judged:
        return steady_state(schedule, self.machine)

    def _summary(self, schedule: Schedule) -> Summary:
        return summarize(schedule, api.simulate(schedule, self.machine), self.machine)


@dataclass(frozen=True)
class Property:
    """A cap or some numbers of the machine that change together.

    `fields` are of the machine's profile, none for a cap. `price_of` names the price in the lower
    bound, if it has one; a price is for one more `unit` of the value shown.
    """

    name: str
    unit: str
    unit_size: float
    fields: tuple[str, ...] = ()
    price_of: str | None = None
    lower_is_better: bool = False


def question_of(
    spec: ModelSpec,
    machine: Machine,
    step: TrainingStep,
    caps: Caps,
    policy: str,
    choices: Choices = OPEN,
) -> Question:
    """A question whose step has the tokens that the planner proposes for these caps, if open.

    They stay the same whatever is changed, so that answers compare.
    """
    return Question(spec, machine, with_tokens(spec, step, machine, caps), caps, policy, choices)


def properties_of(question: Question) -> list[Property]:
    """What can be changed: the caps, and numbers that the profile limits and the plan uses."""
    caps = question.caps
    found = []
    if caps.device_bytes is not None:
        found.append(Property("device memory", "GiB", _GIB, price_of="device"))
    if caps.host_bytes is not None:
        found.append(Property("host memory", "GiB", _GIB, price_of="host"))
    peak = PEAK_OF_DTYPE[question.spec.dtype]
    on_host = optimizer_place(question.policy) != "device"
    numbers = [
        Property("PCIe, all three", "GB/s H2D", _GB, LINK_FIELDS),
        Property("PCIe H2D", "GB/s", _GB, (H2D,), "h2d"),
        Property("PCIe D2H", "GB/s", _GB, (D2H,), "d2h"),
        Property("PCIe, both ways", "GB/s", _GB, (DUPLEX,), "pcie"),
        # The bound's price of HBM is for what copies and kernels draw together, not for the kernels
        # that it alone makes slow: it would mislead beside the difference.
        Property("HBM", "GB/s", _GB, ("hbm_bytes_per_s",)),
        Property("host DRAM", "GB/s", _GB, ("host_dram_bytes_per_s",), "host_dram"),
        Property("compute peak", "TFLOP/s", 1e12, (peak,)),
        Property("launch latency", "us", 1e3, ("launch_latency_ns",), lower_is_better=True),
        Property("copy latency", "us", 1e3, ("copy_latency_ns",), lower_is_better=True),
    ]
    if on_host:
        numbers.append(Property("host CPU peak", "TFLOP/s", 1e12, ("host_peak_fp32_flop_per_s",)))
    return found + [one for one in numbers if _is_limited(question.machine, one)]


def _is_limited(machine: Machine, one: Property) -> bool:
    stated = [getattr(machine, field) is not None for field in one.fields]
    return all(stated) and not any(
        isinf(value) or value == 0 for value in map(machine.number, one.fields)
    )


def value_of(question: Question, one: Property) -> float:
    """In bytes, bytes per s, FLOP/s or ns; of several fields the first one's."""
    if one.fields:
        return question.machine.number(one.fields[0])
    size = question.caps.device_bytes if one.price_of == "device" else question.caps.host_bytes
    assert size is not None
    return float(size)


def changed(question: Question, one: Property, factor: float) -> Question:
    """The question with a property times a factor; a memory that grows is as large as its cap."""
    if one.fields:
        changes = {field: question.machine.number(field) * factor for field in one.fields}
        return replace(question, machine=override(question.machine, changes))
    name = f"{one.price_of}_bytes"
    size = round(value_of(question, one) * factor)
    return replace(question, caps=question.caps.model_copy(update={name: size}))
