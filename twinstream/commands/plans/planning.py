"""`plan`: decide where every tensor lives, and predict what that yields."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from types import MappingProxyType
from typing import Annotated, NamedTuple

from twinstream import api
from twinstream.commands.arguments import options
from twinstream.commands.arguments.inputs import checked_schedule
from twinstream.commands.output import print_json, print_report, progress
from twinstream.fidelity.seed_system.policy import NAME as SEED_POLICY
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.explanation import explain
from twinstream.measures.metrics import summarize
from twinstream.measures.policies_compared import ALL, NoPolicyFits, compare_policies
from twinstream.measures.uncertainty import uncertainty_of
from twinstream.models.demand.attention_limits import nondeterministic_kernels
from twinstream.models.hf_config import DTYPES
from twinstream.models.presets import dtype_note, load_model
from twinstream.models.recipe import KernelChoice, Recipe
from twinstream.models.spec import ModelSpec
from twinstream.planner.choices import OPEN, ChoiceError, Choices
from twinstream.planner.kernel_choice import attention_for, kernels_for
from twinstream.planner.known import KnownPlanError
from twinstream.planner.plan import optimizer_place, policies
from twinstream.planner.search.chunking import TrainingStep
from twinstream.schedule.document import Schedule
from twinstream.schedule.files import write_document
from twinstream.schedule.timeline import Timeline
from twinstream.screens.plan_screen import WIDTH, plan_notes, plan_screen, policies_screen

_ORDERS = ("device", "device_after_backward")
_GRADIENTS = ("model", "float32")


def plan(  # noqa: PLR0913
    model: options.Model,
    machine: options.Machine,
    seq_len: options.SeqLen,
    tokens_per_step: options.TokensPerStep = None,
    optimizer_overhead: options.OptimizerOverhead = None,
    chunk_tokens: options.ChunkTokens = None,
    chunks_per_round: options.ChunksPerRound = None,
    device_mem: options.DeviceMem = None,
    host_mem: options.HostMem = None,
    policy: options.PolicyOrAll = None,
    kernels: options.Kernels = None,
    attention: options.Attention = None,
    nondeterministic: options.Nondeterministic = False,
    gradients: options.Gradients = None,
    float32_master: options.Master = False,
    dtype: options.Dtype = None,
    home: options.Homes = None,
    recompute: options.RecomputeLevel = None,
    prefetch: options.Prefetch = None,
    optimizer: options.OptimizerOrder = None,
    effort: options.EffortOfPlan = None,
    no_slower_than: options.NoSlowerThan = None,
    output: Annotated[Path | None, options.output("Write the schedule here.")] = None,
    as_json: options.Json = False,
) -> None:
    """Plan a training step within memory caps and predict its speed."""
    wanted = options.PlanOptions(
        model, machine, seq_len, tokens_per_step, optimizer_overhead, chunk_tokens,
        chunks_per_round, device_mem, host_mem, policy, kernels, attention, optimizer, gradients,
        float32_master, nondeterministic, dtype,
    )  # fmt: skip
    choices = choices_of(home, recompute, prefetch, effort)
    if policy == ALL:
        _require_open(choices, no_slower_than)
        _plan_all(wanted, output, as_json=as_json)
        return
    known = {path: checked_schedule(path) for path in no_slower_than or []}
    schedule, plan_seconds = planned(wanted, choices, known, quiet=as_json)
    profile = load_machine(machine)
    with progress("simulating", quiet=as_json):
        timeline = api.simulate(schedule, profile)
    taken = next((str(path) for path, plan in known.items() if plan.ops is schedule.ops), None)
    notes = [*dtype_notes(wanted), *plan_notes(schedule, profile, timeline)]
    try:
        if output is not None:
            write_document(schedule, output)
    finally:  # what was planned is told, on a full disk too
        _tell(_Planned(schedule, timeline, profile, plan_seconds, taken, notes), as_json=as_json)
    if output is not None and not as_json:
        print_report(f"Wrote the schedule to {output}.")


class _Planned(NamedTuple):
    schedule: Schedule
    timeline: Timeline
    machine: Machine
    plan_seconds: float
    known_plan: str | None
    notes: list[str]


def _tell(found: _Planned, *, as_json: bool) -> None:
    schedule, machine = found.schedule, found.machine
    summary = summarize(schedule, found.timeline, machine, found.plan_seconds)
    explanation = explain(schedule, found.timeline, machine)
    uncertainty = uncertainty_of(machine, schedule)
    if as_json:
        more = {
            "explanation": explanation, "known_plan": found.known_plan, "notes": found.notes,
            "uncertainty": uncertainty,
        }  # fmt: skip
        print_json(summary.model_dump() | describe(schedule) | more)
        return
    screen = plan_screen(schedule, summary, explanation, uncertainty)
    print_report(screen, *_narrow(found.notes))
    if found.known_plan is not None:
        print_report(f"Nothing faster than {found.known_plan} was found: this is that plan.")


def _require_open(choices: Choices, no_slower_than: list[Path] | None) -> None:
    if choices != OPEN or no_slower_than:
        raise ChoiceError(
            f"--policy {ALL} compares policies as they are; fix or name plans of one of them"
        )


def _plan_all(wanted: options.PlanOptions, output: Path | None, *, as_json: bool) -> None:
    """Compare all policies; fails only where none fits."""
    assert wanted.model is not None and wanted.machine is not None
    what = f"planning {wanted.model} for {wanted.machine} by every policy"
    try:
        with progress(what, len(policies()), quiet=as_json) as advance:
            compared = compare_policies(
                spec_of(wanted),
                wanted.machine,
                step=step_of(wanted),
                device_mem=wanted.device_mem,
                host_mem=wanted.host_mem,
                on_policy=advance,
            )
    except NoPolicyFits as error:
        if as_json:
            print_json({"policies": error.outcomes, "best": None})
        raise
    best = compared.best
    if output is not None:
        write_document(best, output)
    profile = load_machine(wanted.machine)
    notes = [*dtype_notes(wanted), *plan_notes(best, profile, compared.best_timeline)]
    uncertainty = uncertainty_of(profile, best)
    if as_json:
        found = {"policies": compared.outcomes, "best": best.policy, "notes": notes}
        print_json(found | {"best_schedule": describe(best), "uncertainty": uncertainty})
        return
    print_report(policies_screen(compared.outcomes, best, uncertainty), *_narrow(notes))
    if output is not None:
        print_report(f"Wrote the schedule of {best.policy} to {output}.")


def choices_of(
    home: list[str] | None, recompute: str | None, prefetch: float | None, effort: str | None
) -> Choices:
    """What is fixed of a plan.

    >>> choices_of(["parameter=host"], "INPUT", None, None).homes
    {'parameter': 'host'}

    Raises:
        ChoiceError: a home or a number cannot be read.
    """
    homes: dict[str, str] = {}
    for text in home or []:
        kind, found, where = text.partition("=")
        if not found or kind in homes:
            wrong = "twice" if found else "without a place"
            raise ChoiceError(
                f"--home '{text}' names '{kind}' {wrong}; write each kind once, as parameter=host"
            )
        homes[kind] = where
    return Choices(homes, recompute, prefetch, effort or "normal")  # type: ignore[arg-type]


def planned(
    wanted: options.PlanOptions,
    choices: Choices = OPEN,
    known: Mapping[Path, Schedule] = MappingProxyType({}),
    *,
    quiet: bool,
) -> tuple[Schedule, float]:
    """The schedule asked for, and the seconds it took to plan."""
    assert wanted.model is not None and wanted.machine is not None
    step = step_of(wanted)
    start_s = time.perf_counter()
    try:
        with progress(f"planning {wanted.model} for {wanted.machine}", quiet=quiet):
            schedule = api.plan(
                spec_of(wanted),
                wanted.machine,
                step=step,
                device_mem=wanted.device_mem,
                host_mem=wanted.host_mem,
                policy=wanted.policy or api.DEFAULT_POLICY,
                choices=choices,
                known=list(known.values()),
            )
    except KnownPlanError as error:
        path = next(path for path, plan in known.items() if plan is error.plan)
        raise KnownPlanError(error.plan, f"--no-slower-than {path}", error.why) from None
    return schedule, time.perf_counter() - start_s


def _narrow(notes: Sequence[str]) -> list[str]:
    """As wide as the screen above them."""
    return [fill(note, WIDTH) for note in notes]


def spec_of(wanted: options.PlanOptions) -> ModelSpec:
    """The model, in the dtype asked for.

    Raises:
        ChoiceError: there is no such dtype.
        TwinstreamError: there is no such model.
    """
    assert wanted.model is not None
    if wanted.dtype not in (None, *DTYPES):
        raise ChoiceError(f"--dtype '{wanted.dtype}' is unknown; known: {', '.join(DTYPES)}")
    spec = load_model(wanted.model)
    return spec if wanted.dtype is None else spec.model_copy(update={"dtype": wanted.dtype})


def dtype_notes(wanted: options.PlanOptions) -> list[str]:
    """Which dtype is planned where neither the user nor the model's file says."""
    if wanted.model is None or wanted.dtype is not None:
        return []
    note = dtype_note(wanted.model, load_model(wanted.model))
    return [] if note is None else [note]


def step_of(wanted: options.PlanOptions) -> TrainingStep:
    """What of the step is fixed.

    Raises:
        ShareError: the tokens per step are given, and a share to propose them by.
        FixedKernelsError: the policy does not leave its kernels open.
        ChoiceError: an order or a dtype is unknown, or the policy does not leave it open.
        TwinstreamError: the model, the machine, the kernels or the attention are unknown, or do
            not go together.
    """
    assert wanted.model is not None and wanted.seq_len is not None and wanted.machine is not None
    overhead = wanted.optimizer_overhead
    if overhead is not None and wanted.tokens_per_step is not None:
        raise options.ShareError(
            "--optimizer-overhead proposes tokens per step where none are given; leave out "
            "either it or --tokens-per-step"
        )
    if wanted.policy == SEED_POLICY:
        for flag, name in (("--attention", wanted.attention), ("--kernels", wanted.kernels)):
            if name not in (None, "auto", "eager"):
                raise options.FixedKernelsError(
                    f"policy '{SEED_POLICY}' is planned with eager kernels, not {flag} {name}: "
                    "leave it out"
                )
    if wanted.policy == SEED_POLICY and (wanted.gradients == "float32" or wanted.float32_master):
        raise ChoiceError(
            f"policy '{SEED_POLICY}' adds gradients up in the model's dtype and keeps no float32 "
            "master: leave out --gradients and --float32-master"
        )
    _check_order(wanted)
    machine, spec = load_machine(wanted.machine), spec_of(wanted)
    attention = attention_for(
        machine, spec, wanted.attention or "auto", nondeterministic=wanted.nondeterministic
    )
    kernels = kernels_for(machine, wanted.kernels or "auto", attention)
    lengths = options.lengths_of(wanted.seq_len)
    step = TrainingStep(
        max(lengths), wanted.tokens_per_step, wanted.chunk_tokens, wanted.chunks_per_round,
        recipe=_recipe(kernels, wanted),
        sequence_lengths=lengths if len(set(lengths)) > 1 else (),
    )  # fmt: skip
    if overhead is None:
        return step
    return replace(step, optimizer_overhead=options.share_of(overhead))


def _check_order(wanted: options.PlanOptions) -> None:
    """Refuse an order of the optimizer that the policy would overrule."""
    policy = wanted.policy or "optimal"
    place = "device_after_backward" if policy == SEED_POLICY else optimizer_place(policy)
    if wanted.optimizer in _ORDERS and place != "device" and wanted.optimizer != place:
        raise ChoiceError(
            f"policy '{policy}' has the optimizer '{place}', not {wanted.optimizer}: leave out "
            "--optimizer"
        )


def _recipe(kernels: KernelChoice, wanted: options.PlanOptions) -> Recipe:
    if wanted.optimizer not in (None, *_ORDERS):
        raise ChoiceError(
            f"--optimizer '{wanted.optimizer}' is unknown; known: {', '.join(_ORDERS)} (on the "
            "host CPU by --policy optimizer_offload or layer_offload)"
        )
    if wanted.gradients not in (None, *_GRADIENTS):
        raise ChoiceError(
            f"--gradients '{wanted.gradients}' is unknown; known: {', '.join(_GRADIENTS)}"
        )
    return Recipe(
        kernels=kernels,
        optimizer=wanted.optimizer or _ORDERS[0],  # type: ignore[arg-type]
        gradients=wanted.gradients or _GRADIENTS[0],  # type: ignore[arg-type]
        float32_master=bool(wanted.float32_master),
    )


def describe(schedule: Schedule) -> dict[str, object]:
    """What a schedule is about, for JSON."""
    return {
        "model": schedule.model.name,
        "machine": schedule.machine.name,
        "policy": schedule.policy,
        "kernels": schedule.recipe.get("kernels"),
        "nondeterministic": nondeterministic_kernels(schedule),
        "num_ops": len(schedule.ops),
        "workload": schedule.workload,
        "caps": schedule.caps,
        "bound": schedule.bound,
    }
