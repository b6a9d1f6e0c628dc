"""A training step on one device as a query, whose answer is a plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isinf
from typing import Any, get_args

from twinstream.clusters.search.question import value_fault
from twinstream.hardware_profiles.cost import PEAK_OF_DTYPE
from twinstream.hardware_profiles.link import D2H, DUPLEX, H2D, LINK_FIELDS
from twinstream.hardware_profiles.overrides import override
from twinstream.hardware_profiles.profile_files import nearest
from twinstream.hardware_profiles.schema import NUMBER_FIELDS, Machine
from twinstream.models.kernel_costs.attention_limits import attention_names
from twinstream.models.loss import LOSSES, names_loss
from twinstream.models.model import AnyModel
from twinstream.models.recipe import Recipe, recipe_of_fields
from twinstream.options.recipe_options import RecipeOptions
from twinstream.planner.choices import EFFORTS
from twinstream.planner.kernel_choice import KernelsOption, kernels_named
from twinstream.planner.planner import Planner
from twinstream.planner.policies import ON_DEVICE, optimizer_places, policy_names
from twinstream.planner.request import DEFAULT_POLICY, PlanRequest, TrainingStep, caps_of
from twinstream.planner.warm_start import fits
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.python_file import digest_of, split_name
from twinstream.schedule.sizes import gib, parse_bytes
from twinstream.schedule.tensors import DEVICE, HOST
from twinstream.simulator.replay import steady_state
from twinstream.study.planned_step import PlannedStep
from twinstream.study.query import (
    MACHINE_NUMBER,
    MEMORY_CAPS,
    STEP_COUNTS,
    Answer,
    Loader,
    Property,
    Query,
    StudyError,
    Subject,
    Value,
    Values,
    size_fault,
)


def _policy_content(name: str) -> str:
    """What plans follow from: of one's own policy the file's content, too."""
    own = split_name(name)
    return name if own is None else f"{own[1]} {digest_of(own[0])}"


_CHOSEN = ("optimizer_state", "gradients", "base")
_OF_RECIPE = (*_CHOSEN, "lora", "freeze", "optim", "loss")
KNOWN: Mapping[str, tuple[str, ...]] = {
    "policy": (*policy_names(),), "effort": EFFORTS,
    **{name: get_args(RecipeOptions.model_fields[name].annotation) for name in _CHOSEN},
    "kernels": get_args(KernelsOption), "attention": ("auto", *attention_names()),
}  # fmt: skip
_NOT_ASKED = "none"
_GIB, _GB = 2**30, 1e9
_FACTORS = (0.5, 0.9, 1.1, 2.0)


@dataclass(frozen=True)
class DeviceQuery(Query):
    """A plan that is asked for, whose values are those of the options of `plan`."""

    request: PlanRequest

    names = ("model", "machine", *STEP_COUNTS, *MEMORY_CAPS, *KNOWN, *_OF_RECIPE[len(_CHOSEN) :])
    required = ("model", "machine", "seq_len")
    columns = (
        "tokens_per_s", "model_tflop_per_s", "mfu", "hfu", "step_time_s", "lower_bound_s", "gap",
        "gap_family", "limits", "idle_fraction", "recompute_fraction", "device_peak_bytes",
        "host_peak_bytes", "h2d_bytes", "d2h_bytes", "rounds_per_step", "chunks_per_round",
        "planned_chunk_tokens", "expected_error_mean", "expected_error_kind",
    )  # fmt: skip
    resources = (*MEMORY_CAPS, *(f"{MACHINE_NUMBER}{field}" for field in LINK_FIELDS))

    @classmethod
    def of(cls, values: Values, load: Loader) -> "DeviceQuery":
        return cls.on(load.machine(str(values["machine"])), values, load)

    @classmethod
    def on(cls, machine: Machine, values: Values, load: Loader) -> "DeviceQuery":
        """As `of`, on a machine that is no file; what the values call it does not matter."""
        seq_len = int(values["seq_len"])
        lora = str(values.get("lora", _NOT_ASKED))
        loss = None if "loss" not in values else str(values["loss"])
        spec = load.any_model(
            str(values["model"]), seq_len, None if lora == _NOT_ASKED else lora, loss
        )
        base = PlanRequest.of(spec, machine, step=TrainingStep(seq_len))
        rest = {name: value for name, value in values.items() if name not in ("model", "machine")}
        asked = cls(base)._with(rest, load)
        caps = [str(values[name]) if name in values else None for name in MEMORY_CAPS]
        return cls(replace(asked, caps=caps_of(asked.machine, *caps)))

    @classmethod
    def full_name(cls, name: str) -> str:
        if name in cls.names or name.startswith(MACHINE_NUMBER):
            return name
        if name in NUMBER_FIELDS or name.startswith("efficiency."):
            return MACHINE_NUMBER + name
        hint = nearest(name, [*cls.names, *NUMBER_FIELDS])
        raise StudyError(f"'{name}' is nothing of a plan or a machine: {hint}")

    @classmethod
    def fault(cls, name: str, value: object) -> str | None:
        if name in STEP_COUNTS:
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            return None if whole else f"needs a positive whole number, got {value!r}"
        if name in MEMORY_CAPS:
            return size_fault(value)
        if name.startswith(MACHINE_NUMBER):
            return value_fault(name, value)
        if not isinstance(value, str):
            return f"needs a text in quotes, got {value!r}"
        if name == "loss" and not names_loss(value):
            return f"needs {', '.join(map(repr, LOSSES))}, perhaps with options, got '{value}'"
        known = KNOWN.get(name)
        is_own = name == "policy" and split_name(value) is not None
        if known is None or value in known or is_own:
            return None
        own = ", or FILE.py:NAME of your own" if name == "policy" else ""
        return f"'{value}' is unknown; known: {', '.join(known)}{own}"

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
                        asked.choices.prefetch_blocks, asked.choices.effort],
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
        return DeviceQuery(self._with(values, Loader()))

    def _with(self, values: Values, load: Loader) -> PlanRequest:
        was = self.request
        counts: dict[str, Any] = {name: values[name] for name in STEP_COUNTS if name in values}
        longest = int(values.get("seq_len", was.step.seq_len))
        spec = load.any_model(str(values["model"]), longest) if "model" in values else was.spec
        machine = load.machine(str(values["machine"])) if "machine" in values else was.machine
        numbers = {
            name.removeprefix(MACHINE_NUMBER): float(
                parse_bytes(value) if isinstance(value, str) else value
            )
            for name, value in values.items()
            if name.startswith(MACHINE_NUMBER)
        }
        machine = override(machine, numbers) if numbers else machine
        recipe = _recipe(was.step.recipe, spec, machine, values)
        of_pairs = was.step.recipe.loss.sides > 1 and "seq_len" in values
        packing = None if of_pairs else was.step.packing  # of pairs it is of that length
        step = replace(was.step, recipe=recipe, packing=packing, **counts)
        caps = _caps(was, machine, values)
        policy = load.policy(str(values.get("policy", was.policy)))
        request = replace(was, spec=spec, machine=machine, step=step, caps=caps, policy=policy)
        effort: Any = values.get("effort")
        return request if effort is None else request.with_effort(effort)

    def following(self, answer: Answer) -> "DeviceQuery":
        assert isinstance(answer, PlannedStep)
        return DeviceQuery(self.request.with_tokens(answer.schedule.workload.tokens_per_step))

    def answer(
        self, known: Sequence[Answer] = (), planner: Planner | None = None, *,
        enough_tokens_per_s: float = inf, advises: bool = True,
    ) -> PlannedStep:  # fmt: skip
        plans = [one.schedule for one in known if isinstance(one, PlannedStep) and self._is_of(one)]
        schedule = self.planned(plans, planner, advises=advises)
        is_known = any(schedule.ops is plan.ops for plan in plans)
        return PlannedStep.predicted(schedule, self.request, is_known=is_known)

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

    def kept(self, answer: Answer) -> PlannedStep:
        if not isinstance(answer, PlannedStep) or not self._is_of(answer):
            raise StudyError("the plan from before is of another step, model or recipe")
        schedule, caps = answer.schedule, self.request.caps
        if not fits(schedule, caps):
            needs = [gib(arena_bytes(schedule, tier)) for tier in (DEVICE, HOST)]
            raise StudyError(
                f"the plan from before needs {needs[0]} of device memory, and "
                f"{needs[1]} of host memory, beside what the device keeps back"
            )
        return PlannedStep.predicted(schedule, self.request, is_known=True)

    def adopted(self, answer: Answer) -> PlannedStep:
        assert isinstance(answer, PlannedStep)
        schedule = Planner(steady_state).fastest_of(None, [answer.schedule], self.request)
        return PlannedStep.predicted(schedule, self.request, is_known=True)

    def _is_of(self, answer: PlannedStep) -> bool:
        """Whether the answer's plan is of this step, so that it could be this query's, too."""
        mine, other = self.request, answer.asked
        tokens = mine.step.tokens_per_step
        return (
            mine.choices.prefetch_blocks is None  # a plan does not tell how early it loads
            and tokens in (None, answer.schedule.workload.tokens_per_step)
            and (mine.spec, mine.policy, mine.recipe) == (other.spec, other.policy, other.recipe)
            and _cut(mine) == _cut(other)
        )

    def saved_s(self, answer: Answer, one: Property) -> float | None:
        """By the bound's prices; those of links are for what they reach, numbers are nominal."""
        assert isinstance(answer, PlannedStep)
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
    """What is fixed of the step, but for its tokens, and of the plan."""
    step, choices = request.step, request.choices
    given = (step.seq_len, step.chunk_tokens, step.chunks_per_round, step.packing)
    return (*given, dict(choices.homes), choices.recompute, choices.prefetch_blocks)


def _caps(was: PlanRequest, machine: Machine, values: Values) -> Caps:
    """Caps that are given, else as they were; where they were all of a memory, all of it still."""
    before, now = caps_of(was.machine, None, None), caps_of(machine, None, None)
    found: dict[str, int | None] = {}
    for name in MEMORY_CAPS:
        field = name.replace("mem", "bytes")
        if name in values:
            whole = getattr(now, field)
            given: Value = values[name]
            text = given if isinstance(given, str) else str(round(given))
            found[field] = parse_bytes(text, whole_bytes=whole)
        elif getattr(was.caps, field) == getattr(before, field):
            found[field] = getattr(now, field)
    reserve = now.device_reserve_bytes
    return was.caps.model_copy(update={**found, "device_reserve_bytes": reserve})


def _recipe(was: Recipe, spec: AnyModel, machine: Machine, values: Values) -> Recipe:
    """The recipe with what is given of it; patterns have commas in between, or are `none`."""
    given: dict[str, Any] = {name: values[name] for name in _OF_RECIPE if name in values}
    if given.get("lora") == _NOT_ASKED:
        given["lora"] = None
    if "freeze" in given:
        given["freeze"] = () if given["freeze"] == _NOT_ASKED else given["freeze"].split(",")
    changes = RecipeOptions.model_validate(given).given_recipe_fields(spec) if given else {}
    if "kernels" in values or "attention" in values:
        kernels, attention = (
            str(values[n]) if n in values else None for n in ("kernels", "attention")
        )
        changes["kernels"] = kernels_named(machine, spec, kernels, attention)
    return recipe_of_fields({**dict(was), **changes}) if changes else was
