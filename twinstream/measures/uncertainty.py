"""State how far a predicted number may be off, as every screen and JSON says beside it."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from twinstream.clusters.conforms import is_executable
from twinstream.hardware_profiles.attention_rates import Ratio
from twinstream.hardware_profiles.cost import work_time
from twinstream.hardware_profiles.curve_choice import curve_for
from twinstream.hardware_profiles.schema import NUMBER_FIELDS, Machine
from twinstream.measures.published_steps import StepKind, nearest
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.kernel_costs.attention_limits import attention_limits
from twinstream.models.layouts.job import Job
from twinstream.models.lowering.lower import lower
from twinstream.models.presets import load_preset
from twinstream.models.providers.model import provider_named
from twinstream.models.recipes.recipe import Recipe
from twinstream.planner.kernel_choice import usual_kernels
from twinstream.schedule.analysis.periodic import LAST_PASSES, MAX_PASSES
from twinstream.schedule.chain import Chain, Task
from twinstream.schedule.document import RankSchedule, Schedule
from twinstream.schedule.node import Node
from twinstream.schedule.ops import Compute
from twinstream.schedule.sizes import rate_text
from twinstream.schedule.timeline import RankTimeline, Timeline
from twinstream.schedule.workload import Workload

_LEAST_BIAS = 0.005  # that is told
_OF_ASSUMED_RATIO, _OF_NO_RATIO = 0.25, 1.0
_USUAL_STEP = Workload(seq_len=8192, chunk_tokens=16384, chunks_per_round=1, rounds_per_step=4)
_WHY = {
    "held_out": "mean error on measured runs that the profile was not fitted to",
    "left_out": "mean error on each run it was fitted to, left out of the fit",
    "published": "how far the published steps nearest to this one are off, to which no constant "
    "was fitted",
    "borrowed": "mean error where borrowing what kernels reach could be tested",
    "assumed": "assumed",
    "checked": "links, products and attention were checked here before the run",
    "unknown": "no error is known: nothing was predicted and then measured with this profile",
}


class Uncertainty(Node):
    """The expected error of times and rates predicted with a profile.

    `mean` and `worst` are fractions, |predicted / measured - 1|, as the profile's `expected_error`
    states them; None where it states none. They are about `bias`, by which predicted speeds are
    known to be off: true speeds are about 1 + bias times as high. `hypothetical` are the numbers
    that no machine has: what is known of the profile's error is of the machine they were changed
    on. `of_attention` is how much of both is for a schedule's attention that is priced by another
    implementation's rate. `note` is what else to know of it.
    """

    mean: float | None
    worst: float | None
    kind: Literal["held_out", "left_out", "borrowed", "assumed", "checked", "unknown", "published"]
    source: str
    hypothetical: tuple[str, ...] = ()
    of_attention: float = 0.0
    note: str = ""
    bias: float = 0.0

    @property
    def symmetric(self) -> float | None:
        """Return the bar about the prediction as it is, the known bias in it."""
        return None if self.mean is None else self.mean + abs(self.bias)

    @property
    def short(self) -> str:
        """Return the error beside a number: `+/- 1.0 %`, `+/- ?`, `+/- 2.1 %, checked here`.

        A known bias stands before it: true speeds are expected at `-4.1 +/- 3.0 %`.
        """
        told = "+/- ?" if self.mean is None else f"+/- {_percent(self.mean)}"
        if self.mean is not None and abs(self.bias) >= _LEAST_BIAS:
            told = f"{100 * self.bias:+.1f} {told}"
        return f"{told}, checked here" if self.kind == "checked" else told

    @property
    def why(self) -> str:
        """Return in words the kind of test that the error is from."""
        return _WHY[self.kind]

    @property
    def sentence(self) -> str:
        """Return the error as a sentence, with the kind of test and its source."""
        worst = "" if self.worst is None else f", worst {_percent(self.worst)}"
        told = self.short if self.mean is None else f"{self.short}{worst}"
        said = f"Predicted speeds are {told}: {self.why}"
        if self.source:
            said += f" ({self.source})"
        if self.of_attention:
            said += f"; {_percent(self.of_attention)} of it for attention"
        if self.hypothetical:
            said += f"; hypothetical: {', '.join(self.hypothetical)}"
        if self.note:
            said += f"; {self.note}"
        return f"{said}."


class Speed(NamedTuple):
    """A predicted rate and what is known of its error."""

    tokens_per_s: float
    uncertainty: Uncertainty

    @property
    def told(self) -> str:
        return f"{rate_text(self.tokens_per_s)} {self.uncertainty.short}"

    def may_be_as_fast_as(self, faster: "Speed") -> bool:
        """Return whether this may be as fast: the intervals overlap, or one is unknown."""
        mine, other = self.uncertainty, faster.uncertainty
        if mine.mean is None or other.mean is None:
            return True
        most = self.tokens_per_s * (1 + mine.bias + mine.mean)
        return most >= faster.tokens_per_s * (1 + other.bias - other.mean)


def order_note(speeds: Mapping[str, Speed]) -> str | None:
    """Name the machines that may be as fast as one predicted faster; None if there is none.

    Args:
        speeds: of different machines, by name. The error of one profile is common to all that is
            predicted with it.
    """
    order = sorted(speeds, key=lambda name: -speeds[name].tokens_per_s)
    unsure = []
    for place, slower in enumerate(order):
        speed = speeds[slower]
        reached = [name for name in order[:place] if speed.may_be_as_fast_as(speeds[name])]
        if reached:
            fastest = f"{reached[0]} ({speeds[reached[0]].told})"
            unsure.append(f"{slower} ({speed.told}) may be as fast as {fastest}")
    return f"The order is not certain, tokens/s: {'; '.join(unsure)}." if unsure else None


def prediction_notes(schedule: Schedule, machine: Machine, timeline: Timeline) -> list[str]:
    """Return what to know of every number that is predicted of one device's schedule."""
    rates, steady = rate_notes(schedule.only, machine), steady_notes(timeline.only)
    return [uncertainty_of(machine, schedule).sentence, *rates, *steady]


def usual_uncertainties(machines: Sequence[Machine]) -> list[Uncertainty]:
    """Return the error of 8b at 8,192 tokens a sequence on each machine, by `plan`'s kernels."""
    spec = load_preset("8b")
    kernels = [usual_kernels(machine, spec) for machine in machines]
    chains = {one: lower(spec, _USUAL_STEP, Recipe(kernels=one)) for one in set(kernels)}
    pairs = zip(machines, kernels, strict=True)
    return [uncertainty_of_work(machine, chains[one]) for machine, one in pairs]


def uncertainty_of(machine: Machine, schedule: Schedule | None = None) -> Uncertainty:
    """Return how far predictions with a profile may be off, those of a schedule above all."""
    if schedule is None or schedule.is_one_device:
        return uncertainty_of_work(machine, None if schedule is None else schedule.only)
    return _of_mesh(machine, schedule)


def uncertainty_of_work(machine: Machine, work: RankSchedule | Chain | None) -> Uncertainty:
    """Return how far predictions of one device's work may be off.

    A ratio of rates that is assumed counts with a quarter of what attention takes, one that nobody
    knows with all of it: that is how far apart implementations are on one machine.
    """
    hypothetical = _hypothetical(machine)
    found = machine.expected_error
    if work is not None and provider_named(work.model) != ModelSpec.provider:
        return Uncertainty(
            mean=None, worst=None, kind="unknown", source="", hypothetical=hypothetical,
            note="the profile was measured with twinstream's own kernels, and this model is a "
            "traced module" if found is not None else "",
        )  # fmt: skip
    if found is None:
        return Uncertainty(
            mean=None, worst=None, kind="unknown", source="", hypothetical=hypothetical
        )
    more = 0.0 if work is None else _of_attention(work, machine)
    return Uncertainty(
        mean=found.mean + more, worst=None if found.worst is None else found.worst + more,
        kind=found.kind, source=found.source, hypothetical=hypothetical, of_attention=more,
    )  # fmt: skip


def uncertainty_of_job(job: Job, machine: Machine, document: Callable[[], Schedule]) -> Uncertainty:
    """Return how far predictions of a job on many GPUs are off.

    Args:
        machine: the profile of a node.
        document: makes the job's schedule, which is asked for where no published step is near.
    """
    kind = None if job.layout.offload or job.is_own else StepKind.of(job)
    return _of_many(machine, kind, document)


def _of_mesh(machine: Machine, schedule: Schedule) -> Uncertainty:
    """Of a schedule whose kernels are ours it is what is known of the machine's profile: published
    steps were computed by other kernels.
    """
    kind = StepKind.in_document(schedule)
    parts = schedule.schedules.values()
    if is_executable(schedule) or any(op.kind == "copy" for p in parts for op in p.ops):
        kind = None
    return _of_many(machine, kind, lambda: schedule)


def _of_many(
    machine: Machine, kind: StepKind | None, document: Callable[[], Schedule]
) -> Uncertainty:
    near = nearest(kind, machine) if kind is not None and kind.gpus > 1 else None
    if near is None:
        schedule = document()
        alone = uncertainty_of_work(machine, schedule.of(schedule.classes[0]))
        if schedule.mesh.size == 1:
            return alone
        gpus = f"several GPUs of {machine.name.removesuffix('-node')}"
        note = f"of one device: no step like this on {gpus} is known"
        return alone.model_copy(update={"note": note})
    return Uncertainty(
        mean=near.bar, worst=near.worst, kind="published", source=f"{near.told}: {near.source}",
        hypothetical=_hypothetical(machine), bias=near.bias,
    )  # fmt: skip


def _of_attention(schedule: RankSchedule | Chain, machine: Machine) -> float:
    """What attention that is priced by another's rate may add, as a share of all compute alone."""
    ops = schedule.tasks if isinstance(schedule, Chain) else schedule.ops
    times = Counter(op.call for op in ops if isinstance(op, Compute | Task))
    total_ns = unsure_ns = 0.0
    for name, number in times.items():
        for work in schedule.calls[name].cost:
            alone_ns = number * work_time(work, machine).alone_ns
            total_ns += alone_ns
            if work.implementation is None or not work.unit.startswith("attention"):
                continue
            chosen = curve_for(work, machine)
            if chosen.of != work.implementation:
                known = chosen.ratio.source is not None
                unsure_ns += alone_ns * (_OF_ASSUMED_RATIO if known else _OF_NO_RATIO)
    return unsure_ns / total_ns if total_ns else 0.0


def steady_notes(timeline: RankTimeline) -> tuple[str, ...]:
    """Return a note on a predicted step that no period proves; nothing if one does."""
    if not timeline.is_unproven:
        return ()
    return (
        f"No period shows within {MAX_PASSES} passes: the step is the mean of the last "
        f"{LAST_PASSES}, not proven. Streams that hardly wait for one another drift apart; of such "
        "schedules, made by hand, 3 in 10 were off by up to 50 % against a long run.",
    )


def rate_notes(schedule: RankSchedule, machine: Machine) -> list[str]:
    """Return notes on a profile's rates: which steps they are of, which attention is assumed of
    a machine elsewhere, and whose rate prices it if the profile has none.
    """
    found: dict[tuple[str, str | None], dict[str, Ratio]] = {}
    for work in (work for call in schedule.calls.values() for work in call.cost):
        if work.implementation is None:
            continue
        chosen = curve_for(work, machine)
        if chosen.of != work.implementation:
            ratios = found.setdefault((work.implementation, chosen.of), {})
            ratios[work.unit.removeprefix("attention_")] = chosen.ratio
    told = [_rate_note(name, of, ratios, machine.name) for (name, of), ratios in found.items()]
    notes = (*_profile_note(machine), *_memory_note(machine), *_usual_note(schedule, machine))
    return [*notes, *told]


def _profile_note(machine: Machine) -> list[str]:
    """What else there is of a GPU whose profile is of steps of many."""
    alone = machine.one_gpu_profile
    if alone is None:
        return []
    return [
        f"{machine.name} has constants that were fitted to training steps of many GPUs; the same "
        f"GPU by itself, fitted to runs of one, is --machine {alone}, and predicted faster."
    ]


def _memory_note(machine: Machine) -> list[str]:
    """Of a profile that may count one memory twice."""
    device, host = machine.device_memory_bytes, machine.host_memory_bytes
    if machine.unified_memory_bytes is not None or device is None or host is None:
        return []
    if device.value is None or device.value != host.value or "assumed" in (device.kind, host.kind):
        return []
    return [
        f"Device and host memory of {machine.name} are equally large: where both are one (DGX "
        "Spark, Strix Halo, Jetson), it is counted twice. State unified_memory_bytes, and divide "
        "it between the two."
    ]


def _usual_note(schedule: RankSchedule, machine: Machine) -> list[str]:
    usual = machine.attention
    names = {call.attributes.get("attention") for call in schedule.calls.values()}
    if usual is None or usual.kind != "assumed" or usual.name not in names:
        return []
    if attention_limits(usual.name).library is None:
        return []
    return [f"Attention {usual.name} is assumed of {machine.name}: {usual.source}."]


def _rate_note(name: str, of: str | None, ratios: Mapping[str, Ratio], machine: str) -> str:
    if of is None:
        return (
            f"{machine} does not say whose its rates of attention are; attention {name} is priced "
            "by them as they are."
        )
    priced = f"{machine} has no rate of attention {name}: it is priced by {of}'s"
    sources = {ratio.source for ratio in ratios.values() if ratio.source is not None}
    if not sources:
        return f"{priced} as it is, since nothing is known of their ratio there."
    shares = " and ".join(f"{ratio.value:.2f} ({unit})" for unit, ratio in ratios.items())
    return f"{priced}, times {shares}, an assumed ratio ({'; '.join(sorted(sources))})."


def _hypothetical(machine: Machine) -> tuple[str, ...]:
    """Names of the numbers that no machine has."""
    numbers = [name for name in NUMBER_FIELDS if _is_hypothetical(getattr(machine, name))]
    curves = [f"efficiency.{key}" for key, c in machine.efficiency.items() if _is_hypothetical(c)]
    return (*numbers, *curves)


def _is_hypothetical(stated: Node | None) -> bool:
    return getattr(stated, "kind", None) in ("hypothetical", "unconstrained")


def _percent(fraction: float) -> str:
    return f"{fraction:.1%}".replace("%", " %") if fraction < 0.1 else f"{100 * fraction:.0f} %"
