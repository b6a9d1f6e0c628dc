"""What `plan` prints: one plan on one screen of 80 columns and 40 lines."""

from collections.abc import Mapping

from rich import box
from rich.console import Group, RenderableType

from twinstream.clusters.kernel_sets import recipe_text, why_schedule_not_here
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.explanation import Explanation, Recomputed, explain
from twinstream.measures.metrics import Summary, summarize
from twinstream.measures.residence import Residence
from twinstream.measures.uncertainty import prediction_notes, uncertainty_of
from twinstream.measures.wear import wear_notes
from twinstream.models.kernel_costs.attention_limits import nondeterministic_kernels
from twinstream.models.layout import EXPERTS, ROUTER_BIAS, layer_of
from twinstream.models.providers.model import AnyModel, model_of
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.document import Caps, Schedule, UpdatePlan
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.sizes import brief, gib
from twinstream.schedule.tensors import HOST
from twinstream.schedule.timeline import Timeline
from twinstream.schedule.workload import ModelRef
from twinstream.screens.fitted_table import FittedTable
from twinstream.screens.tables import (
    nondeterminism_notes,
    readable,
    seconds,
    speed_text,
    workload_line,
)

_GIB = 2**30
_MIB = 2**20
_FEW_LAYERS = 4
WIDTH = 78
_MOST_OF_HOST = 0.9


def plan_screen(
    schedule: Schedule, timeline: Timeline, machine: Machine, plan_seconds: float | None = None
) -> Group:
    """One plan on a machine: speed and gaps, what limits it, what it moves and keeps where."""
    summary = summarize(schedule, timeline, machine, plan_seconds)
    explanation = explain(schedule, timeline, machine)
    work = schedule.workload
    parts: list[RenderableType] = [
        f"{schedule.only.model.name} planned for {schedule.machine.name}, policy {schedule.policy}",
        f"{work.tokens_per_step:,} tokens a step: {workload_line(work)}",
        _headlines(schedule, summary, explanation, machine),
        residence_table(explanation.residence, schedule.caps),
    ]
    if any(price.saves_s_per_step for price in explanation.prices):
        parts.append(_prices_table(explanation, summary.step_time_s))
    return Group(*parts)


def plan_notes(schedule: Schedule, machine: Machine, timeline: Timeline) -> list[str]:
    """What to know before a plan is relied on."""
    own, recipe = schedule.only, Recipe.model_validate(schedule.recipe)
    found = [
        recipe_line(model_of(own.model), recipe, why_schedule_not_here(own)),
        *prediction_notes(schedule, machine, timeline),
        *wear_notes(schedule, machine, timeline.step_ns / 1e9),
    ]
    host, taken = machine.host_memory_bytes, arena_bytes(own, HOST)
    if host is not None and host.value is not None and taken > _MOST_OF_HOST * host.value:
        found.append(
            f"{gib(taken)} of the host's {gib(round(host.value))} are pinned, which leaves little "
            "for anything else: give a lower --host-mem."
        )
    found += nondeterminism_notes(schedule.only)
    return found


def recipe_line(model: AnyModel, recipe: Recipe, why_not_here: str | None) -> str:
    """Say how a model is computed, and whether that runs on this machine or why not."""
    runs = "Runs here" if why_not_here is None else f"Does not run here: {why_not_here}"
    return f"Recipe: {recipe_text(model, recipe)}. {runs}."


def _headlines(
    schedule: Schedule, summary: Summary, explanation: Explanation, machine: Machine
) -> FittedTable:
    table = FittedTable(box=None, show_header=False, width=WIDTH, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    cold, own = seconds(summary.cold_step_time_s), schedule.only
    table.add_row("step time", f"{seconds(summary.step_time_s)} ({cold} from a cold start)")
    table.add_row("throughput", speed_text(summary, uncertainty_of(machine, schedule)))
    peak = f"of the {own.model.spec['dtype']} peak of {machine.name}"
    table.add_row("MFU, HFU", f"{summary.mfu:.1%}, {summary.hfu:.1%} {peak}")
    bound = schedule.bound
    if bound is not None and summary.gap is not None:
        shown = f"{seconds(bound.step_s)} for this chunking; the step is {summary.gap:.1%} above it"
        if bound.family_step_s is not None and summary.gap_family is not None:
            family = f"{seconds(bound.family_step_s)} for any; {summary.gap_family:.1%}"
            shown += f"\n{family} above it"
        if bound.fixed:
            shown += f"\nof plans with {', '.join(bound.fixed)}"
        table.add_row("lower bound", shown)
        limits = ", ".join(map(readable, explanation.limits))
        table.add_row("limited by", limits or "-")
    table.add_row("compute waits", _waits(explanation))
    moved = ", ".join(
        f"{gib(size)} {'inside the device' if queue == 'compute' else readable(queue)}"
        for queue, size in explanation.copied_bytes.items()
    )
    table.add_row("copied per step", moved or "nothing")
    table.add_row("recomputed", _recomputed(explanation.recomputed))
    kernels, model = schedule.recipe.get("kernels"), model_of(own.model)
    if isinstance(kernels, dict):  # schedules of before name none
        bits = " (not deterministic)" if nondeterministic_kernels(own) else ""
        attention, whose = kernels["attention"], ""
        if model.attention is not None:
            attention, whose = model.attention, "the module's own; of updates "
        table.add_row("kernels", f"{whose}{kernels['vector']}, attention {attention}{bits}")
    if told := trained_text(schedule.recipe | _adapters(own.model)):
        table.add_row("trains", told)
    if model.unread_told is not None:
        table.add_row("not trained", model.unread_told)
    if own.places is not None:
        table.add_row("updates", _places_text(own.places))
    if summary.plan_seconds is not None:
        table.add_row("planned in", seconds(summary.plan_seconds))
    return table


def _places_text(places: UpdatePlan) -> str:
    pairs = (("device", places.device_step_s), ("host", places.host_step_s))
    alone = ", ".join(
        f"on the {where} {'does not fit' if step_s is None else seconds(step_s)}"
        for where, step_s in pairs
    )
    return f"{places.groups_on_host} of {places.groups} groups on the host; all {alone}"


def _adapters(model: ModelRef) -> dict[str, object]:
    """Those that a traced module has."""
    match model.spec:
        case {"source": {"lora": {} as lora}}:
            return {"lora": lora}
    return {}


def trained_text(recipe: Mapping[str, object]) -> str:
    """What a recipe trains, where that is not all.

    >>> trained_text({"frozen": ["0", "1", "head"]})
    'all but layers 0, 1 and head, which are frozen'
    """
    match recipe:
        case {"lora": {"rank": rank, "alpha": alpha, "targets": [*targets], **more}}:
            names = ", ".join(map(str, targets)) or "every linear layer of the blocks"
            kept = f" in {recipe['base']}" if "base" in recipe else ""
            scaled = " (rank-stabilised)" if more.get("rslora") else ""
            told = more.get("saved", [])
            saved = [str(name) for name in told] if isinstance(told, list | tuple) else []
            whole = f", and {' and '.join(saved)} whole" if saved else ""
            rest = "the rest of the base" if saved else "the base"
            return (
                f"adapters of rank {rank}, alpha {alpha:g}{scaled}, on {names}{whole}; {rest} is "
                f"frozen{kept}"
            )
        case {"frozen": [*groups]} if groups:
            told = [str(group) for group in groups if not str(group).endswith(ROUTER_BIAS)]
            layers = [group for group in told if group.isdigit()]
            of_experts = [group.removesuffix(EXPERTS) for group in told if group.endswith(EXPERTS)]
            of_experts = [number for number in of_experts if number not in layers]
            named = [group for group in told if layer_of(group) is None]
            parts = [_layers_text(layers), f"the experts of {_layers_text(of_experts)}"]
            parts = [part for part, some in zip(parts, (layers, of_experts), strict=True) if some]
            return f"all but {' and '.join([*parts, *named])}, which are frozen"
    return ""


def _layers_text(numbers: list[str]) -> str:
    if len(numbers) > _FEW_LAYERS:
        return f"{len(numbers)} layers"
    return f"layers {', '.join(sorted(numbers, key=int))}"


def _waits(explanation: Explanation) -> str:
    idle = explanation.compute_idle_fraction
    if not idle:
        return "never"
    causes = ", ".join(
        f"{readable(cause)} {share:.1%}"
        for cause, share in sorted(idle.items(), key=lambda item: -item[1])
    )
    return f"{sum(idle.values()):.1%} of the step, for {causes}"


def _recomputed(recomputed: Recomputed) -> str:
    if not recomputed.num_blocks_by_level:
        return "nothing"
    levels = ", ".join(
        f"{count:,} from {level}" for level, count in recomputed.num_blocks_by_level.items()
    )
    return (
        f"{recomputed.fraction_of_flops:.1%} of the FLOPs; of {recomputed.num_blocks:,} blocks "
        f"{levels}"
    )


def residence_table(residence: Residence, caps: Caps) -> Group:
    """A row per role, in GiB, or in MiB where all is small; peaks add up to what is taken.

    What would be 0.00 has a unit of its own.
    """
    device = sum(role.device_peak_bytes for role in residence.roles)
    host = sum(role.host_peak_bytes for role in residence.roles)
    taken = device + residence.device_unused_bytes + residence.device_reserve_bytes
    taken_host = host + residence.host_unused_bytes
    unit, name = _unit(max(taken, taken_host))
    table = FittedTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(name)
    columns = _columns(residence)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)

    def shown(size_bytes: int) -> str:
        text = f"{size_bytes / unit:,.2f}" if size_bytes else "-"
        return text if text != "0.00" else brief(size_bytes)

    for role in residence.roles:
        if any(value for value in role.model_dump(exclude={"role"}).values()):
            table.add_row(role.role, *(shown(getattr(role, one)) for one in columns.values()))
    unused = residence.device_unused_bytes, residence.host_unused_bytes
    table.add_row("unused (packing)", *map(shown, unused))
    table.add_row("context, libraries", shown(residence.device_reserve_bytes), "-")
    table.add_row("taken", shown(taken), shown(taken_host))
    limits = caps.device_bytes, caps.host_bytes
    table.add_row("cap", *("none" if cap is None else f"{cap / unit:,.2f}" for cap in limits))
    title = "Memory at its fullest, homes of the state, copies per step; by role"
    return Group("", title, table)


def _columns(residence: Residence) -> dict[str, str]:
    """Fields by heading; of a disk only where there is one, beside which an empty one has to go."""
    found = {
        "device\npeak": "device_peak_bytes", "host\npeak": "host_peak_bytes",
        "device\nonly": "device_only_bytes", "host\nhome": "host_home_bytes",
        "both": "both_bytes", "H2D": "h2d_bytes", "D2H": "d2h_bytes",
    }  # fmt: skip
    of_disk = {
        "disk\nhome": "disk_home_bytes", "disk\nread": "disk_read_bytes",
        "disk\nwritten": "disk_written_bytes",
    }  # fmt: skip
    used = {n: f for n, f in of_disk.items() if any(getattr(r, f) for r in residence.roles)}
    if len(used) == len(of_disk) and not any(role.both_bytes for role in residence.roles):
        del found["both"]
    return found | used


def _prices_table(explanation: Explanation, step_s: float) -> Group:
    """What one more unit is worth: a MiB of a memory, if a GiB came to more than the step."""
    table = FittedTable(box=None, show_header=False, padding=(0, 2, 0, 0))
    for price in explanation.prices:
        if price.saves_s_per_step:
            unit, _, thing = price.what.partition(" of ")
            share = 1.0
            if unit == "GiB" and price.saves_s_per_step > step_s:
                unit, share = "MiB", _MIB / _GIB
            table.add_row(
                f"one more {unit} of {readable(thing)}",
                f"+{share * price.adds_tokens_per_s:,.1f} tokens/s",
                f"saves {seconds(share * price.saves_s_per_step)} a step",
            )
    return Group("", "Worth buying, by the lower bound, to first order", table)


def _unit(largest_bytes: int) -> tuple[int, str]:
    return (_GIB, "GiB") if largest_bytes >= _GIB else (_MIB, "MiB")
