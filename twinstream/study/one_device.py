"""A training step on one device as a query, whose answer is a plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, isinf
from typing import Any, ClassVar

from twinstream.hardware_profiles.cost import PEAK_OF_DTYPE
from twinstream.hardware_profiles.link import D2H, DUPLEX, H2D, LINK_FIELDS
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.providers.model import AnyModel
from twinstream.models.recipes.recipe import Recipe
from twinstream.options.recipe_options import RecipeOptions
from twinstream.planner.kernel_choice import kernels_named
from twinstream.planner.planner import Planner
from twinstream.planner.policies import ON_DEVICE, optimizer_places
from twinstream.planner.request import DEFAULT_POLICY, PlanRequest, caps_of
from twinstream.planner.warm_start import fits
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.python_file import digest_of, split_name
from twinstream.schedule.sizes import gib, parse_bytes
from twinstream.schedule.tensors import DEVICE, HOST
from twinstream.simulator.replay import steady_state
from twinstream.study.answer import Answer, StudyError
from twinstream.study.query import Loader, Property, Query, Subject, with_machine_numbers
from twinstream.study.values import (
    MACHINE_NUMBER,
    MEMORY_CAPS,
    STEP_COUNTS,
    Kind,
    Value,
    Values,
    numbers_among,
    written_options,
)


def _policy_content(name: str) -> str:
    """Return the name of a policy, of one's own with a digest of its file: plans follow from it."""
    own = split_name(name)
    return name if own is None else f"{own[1]} {digest_of(own[0])}"


_GIB, _GB = 2**30, 1e9
_FACTORS = (0.5, 0.9, 1.1, 2.0)


@dataclass(frozen=True)
class DeviceQuery(Query):
    """A plan that is asked for, whose values are those of the options of `plan`."""

    request: PlanRequest

    kind: ClassVar[Kind] = "device"

    @property
    def subject(self) -> Subject:
        asked = self.request
        return Subject(
            model=asked.spec.name, machine=asked.machine.name, policy=asked.policy,
            tokens_per_step=asked.step.tokens_per_step,
        )  # fmt: skip

    @property
    def is_searched(self) -> bool:
        return self.request.policy == DEFAULT_POLICY

    @property
    def content(self) -> dict[str, Any]:
        asked = self.request
        error = asked.machine.expected_error  # of the figures, though no plan follows from it
        return {
            "model": asked.spec.ref().content_hash,
            "machine": asked.machine.content_hash,
            "error": None if error is None else error.model_dump(),
            "caps": asked.caps.model_dump(),
            "step": [getattr(asked.step, name) for name in STEP_COUNTS],
            "overhead": asked.step.optimizer_overhead,
            "packing": None if asked.step.packing is None else asked.step.packing.model_dump(),
            "recipe": asked.recipe.model_dump(mode="json"),
            "policy": _policy_content(asked.policy),
            "choices": [sorted(asked.choices.homes.items()), asked.choices.recompute,
                        asked.choices.prefetch_blocks, asked.choices.effort,
                        *({asked.choices.optimizer} - {"recipe"})],
        }  # fmt: skip

    @property
    def properties(self) -> list[Property]:
        """The caps, and numbers that the profile limits and the plan uses."""
        request, machine = self.request, self.request.machine
        found = [
            Property(f"{kind} memory", (f"{kind}_mem",), (cap,), "GiB", _GIB, _FACTORS, kind)
            for kind, cap in (
                ("device", request.caps.device_bytes), ("host", request.caps.host_bytes),
            )
            if cap is not None
        ]  # fmt: skip
        on_host = optimizer_places(request.policy)[0] not in ON_DEVICE
        numbers: list[tuple[str, str, float, tuple[str, ...], str | None]] = [
            ("PCIe, all three", "GB/s H2D", _GB, LINK_FIELDS, None),
            ("PCIe H2D", "GB/s", _GB, (H2D,), "h2d"),
            ("PCIe D2H", "GB/s", _GB, (D2H,), "d2h"),
            ("PCIe, both ways", "GB/s", _GB, (DUPLEX,), "pcie"),
            # The bound's price of HBM is for what copies and kernels draw together, not for the
            # kernels that it alone makes slow: it would mislead beside the difference.
            ("HBM", "GB/s", _GB, ("hbm_bytes_per_s",), None),
            ("host DRAM", "GB/s", _GB, ("host_dram_bytes_per_s",), "host_dram"),
            ("compute peak", "TFLOP/s", 1e12, (PEAK_OF_DTYPE[request.spec.dtype],), None),
            ("launch latency", "us", 1e3, ("launch_latency_ns",), None),
            ("copy latency", "us", 1e3, ("copy_latency_ns",), None),
            *([("host CPU peak", "TFLOP/s", 1e12, ("host_peak_fp32_flop_per_s",), None)]
              if on_host else []),
        ]  # fmt: skip
        for name, unit, size, fields, price_of in numbers:
            if any(getattr(machine, field) is None for field in fields):
                continue
            values = tuple(map(machine.number, fields))
            if not all(values) or any(map(isinf, values)):
                continue
            names = tuple(MACHINE_NUMBER + field for field in fields)
            less = name.endswith("latency")
            searched = name == "PCIe, all three"
            found.append(
                Property(name, names, values, unit, size, _FACTORS, price_of, less, searched)
            )
        return found

    @property
    def quick(self) -> "DeviceQuery":
        return DeviceQuery(self.request.with_effort("quick"))

    def changed(self, values: Values) -> "DeviceQuery":
        return DeviceQuery(changed_request(self.request, values, Loader()))

    def following(self, answer: Answer) -> "DeviceQuery":
        schedule = answer.schedule
        return DeviceQuery(self.request.with_tokens(schedule.workload.tokens_per_step))

    def answer(
        self, known: Sequence[Answer] = (), planner: Planner | None = None, *,
        enough_tokens_per_s: float = inf, advises: bool = True,
        progress: Callable[[str], None] = lambda text: None,
    ) -> Answer:  # fmt: skip
        plans = [one.schedule for one in known if self._is_of(one)]
        return self._of(self.planned(plans, planner, advises=advises), plans)

    def begun_from(self, plans: Sequence[Schedule]) -> Answer:
        return self._of(self.planned(plans), plans)

    def _of(self, schedule: Schedule, plans: Sequence[Schedule]) -> Answer:
        is_known = any(schedule.ops is plan.ops for plan in plans)
        return Answer.of_plan(schedule, self.request, is_known=is_known)

    def planned(
        self, known: Sequence[Schedule] = (), planner: Planner | None = None, *,
        advises: bool = True,
    ) -> Schedule:  # fmt: skip
        """The schedule of the answer; `known` are plans of this very step.

        Raises:
            WarmStartError: one of these is of another step.
            InfeasiblePlan: nothing fits.
        """
        return (planner or Planner(steady_state)).plan(self.request, known, name_caps=advises)

    def kept(self, answer: Answer) -> Answer:
        if not self._is_of(answer):
            raise StudyError("the plan from before is of another step, model or recipe")
        schedule, caps = answer.schedule, self.request.caps
        if not fits(schedule.only, caps):
            needs = [gib(arena_bytes(schedule.only, tier)) for tier in (DEVICE, HOST)]
            raise StudyError(
                f"the plan from before needs {needs[0]} of device memory, and "
                f"{needs[1]} of host memory, beside what the device keeps back"
            )
        return Answer.of_plan(schedule, self.request, is_known=True)

    def adopted(self, answer: Answer) -> Answer:
        known = [answer.schedule.only]
        fastest = Schedule.of_rank(Planner(steady_state).fastest_of(None, known, self.request))
        return Answer.of_plan(fastest, self.request, is_known=True)

    def _is_of(self, answer: Answer) -> bool:
        """Return whether the answer's plan is of this step, and could be this query's, too."""
        if answer.layout is not None:
            return False
        schedule, mine, other = answer.schedule, self.request, answer.asked
        tokens = mine.step.tokens_per_step
        return (
            mine.choices.prefetch_blocks is None  # a plan does not tell how early it loads
            and tokens in (None, schedule.workload.tokens_per_step)
            and (mine.spec, mine.policy, mine.recipe) == (other.spec, other.policy, other.recipe)
            and _cut(mine) == _cut(other)
        )

    def saved_s(self, answer: Answer, one: Property) -> float | None:
        """Return the bound's price; those of links are for what they reach, numbers are nominal."""
        bound = answer.schedule.bound
        if bound is None or one.price_of is None:
            return None
        if one.price_of not in bound.link_s_per_gb_per_s:
            prices = {"device": bound.device_s_per_gib, "host": bound.host_s_per_gib}
            return prices.get(one.price_of)
        field = one.fields[0].removeprefix(MACHINE_NUMBER)
        reached = self.request.machine.rate(field) / self.request.machine.number(field)
        return bound.link_s_per_gb_per_s[one.price_of] * reached


def _cut(request: PlanRequest) -> tuple[object, ...]:
    """Return what is fixed of the step, but for its tokens, and of the plan."""
    step, choices = request.step, request.choices
    given = (step.seq_len, step.chunk_tokens, step.chunks_per_round, step.packing)
    return (*given, dict(choices.homes), choices.recompute, choices.prefetch_blocks)


_CHANGES = frozenset(
    (
        "model", "machine", "policy", "effort", "kernels", "attention", *STEP_COUNTS, *MEMORY_CAPS,
        "lora", "loss", "freeze", "base", "optim", "optimizer_state", "gradients",
    )
)  # fmt: skip


def changed_request(
    was: PlanRequest, values: Values, load: Loader, ranks: tuple[int, int] = (1, 1)
) -> PlanRequest:
    """The request with other values, which were checked by `fault_of`.

    Args:
        ranks: so many shared the host's memory, and share it now.

    Raises:
        TwinstreamError: a value cannot be, or is of what only a query from the start has.
    """
    for name in values:
        if name not in _CHANGES and not name.startswith(MACHINE_NUMBER):
            raise StudyError(f"{name} cannot be changed of a query: ask another from the start")
    counts: dict[str, Any] = {name: values[name] for name in STEP_COUNTS if name in values}
    longest = int(values.get("seq_len", was.step.seq_len))
    spec = load.model(str(values["model"]), longest) if "model" in values else was.spec
    machine = load.machine(str(values["machine"])) if "machine" in values else was.machine
    machine = with_machine_numbers(machine, numbers_among(values))
    recipe = changed_recipe(was.step.recipe, spec, machine, values)
    of_pairs = was.step.recipe.loss.sides > 1 and "seq_len" in values
    packing = None if of_pairs else was.step.packing  # of pairs it is of that length
    step = replace(was.step, recipe=recipe, packing=packing, **counts)
    caps = changed_caps(was, machine, values, ranks)
    policy = load.policy(str(values.get("policy", was.policy)))
    request = replace(was, spec=spec, machine=machine, step=step, caps=caps, policy=policy)
    effort: Any = values.get("effort")
    return request if effort is None else request.with_effort(effort)


def changed_caps(
    was: PlanRequest, machine: Machine, values: Values, ranks: tuple[int, int] = (1, 1)
) -> Caps:
    """Caps that are given, else as they were; where they were all of a memory, all of it still."""
    before = caps_of(was.machine, None, None, ranks[0])
    now = caps_of(machine, None, None, ranks[1])
    found: dict[str, int | None] = {}
    for name in MEMORY_CAPS:
        field = name.replace("mem", "bytes")
        if name in values:
            given: Value = values[name]
            text = given if isinstance(given, str) else str(round(given))
            found[field] = parse_bytes(text, whole_bytes=getattr(now, field))
        elif getattr(was.caps, field) == getattr(before, field):
            found[field] = getattr(now, field)
    reserve = now.device_reserve_bytes
    return was.caps.model_copy(update={**found, "device_reserve_bytes": reserve})


def changed_recipe(was: Recipe, spec: AnyModel, machine: Machine, values: Values) -> Recipe:
    """The recipe with what is given of it."""
    given = written_options(
        {name: value for name, value in values.items() if name in RecipeOptions.model_fields}
    )
    others: dict[str, object] = {}
    if "kernels" in values or "attention" in values:
        kernels, attention = (
            str(values[n]) if n in values else None for n in ("kernels", "attention")
        )
        others["kernels"] = kernels_named(machine, spec, kernels, attention)
    return RecipeOptions.model_validate(given).changed(was, spec, **others)
