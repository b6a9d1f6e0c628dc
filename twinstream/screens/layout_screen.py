"""The layouts that a search has found, as a table of a terminal."""

from collections.abc import Callable, Sequence

from rich import box
from rich.console import Group

from twinstream.clusters.kernel_sets import recipe_text, why_not_here
from twinstream.clusters.search.found import RankedLayout, SearchResult
from twinstream.cost.bill import Bill
from twinstream.hardware_profiles.clusters.published_memory import Framework, published_memory
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.measures.uncertainty import Uncertainty
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.schedule.analysis.idle import exposed_communication
from twinstream.screens.fitted_table import FittedTable
from twinstream.screens.tables import cause_name

_GIB = 2**30


def layouts_screen(
    job: Job,
    cluster: Cluster,
    found: SearchResult,
    errors: Sequence[Uncertainty],
    seconds: float,
) -> Group:
    """The best layouts, fastest first, and what the fastest could be beaten by.

    Args:
        errors: how far the prediction of each layout may be off.
    """
    num_gpus = found.best[0].prediction.num_gpus
    table = FittedTable(box=box.SIMPLE, pad_edge=False)
    on_host = any(one.prediction.host_bytes for one in found.best)
    host = ("host GiB",) if on_host else ()
    for name in ("", "step s", "+/-", "tok/s per GPU", "MFU", "memory GiB", *host, "bubble",
                 "exposed comm.", "over its bound"):  # fmt: skip
        table.add_column(name, justify="right" if name else "left")
    for number, (one, error) in enumerate(zip(found.best, errors, strict=True), 1):
        prediction = one.prediction
        table.add_row(
            str(number),
            f"{prediction.step_s:.4g}",
            error.short.removeprefix("+/- "),
            f"{prediction.tokens_per_s / num_gpus:,.0f}",
            f"{prediction.mfu:.1%}",
            f"{prediction.memory_bytes / _GIB:.1f}",
            *((f"{prediction.host_bytes / _GIB:.1f}",) if on_host else ()),
            f"{prediction.shares.get('bubble', 0.0):.1%}",
            f"{exposed_communication(prediction.shares):.1%}",
            f"{prediction.step_s / one.bound_s - 1:.1%}",
        )
    head = (
        f"{job.shape.name} on {num_gpus:,} GPUs of {cluster.name}, {job.global_batch:,} sequences "
        f"of {job.seq_len:,} tokens a step"
    )
    room = found.best[0].prediction.room_bytes / _GIB
    foot = (
        f"{found.num_layouts:,} layouts are possible, {found.num_fit:,} may fit {room:.1f} GiB, "
        f"{found.num_simulated:,} were simulated, in {seconds:.1f} s. The fastest is "
        f"{found.gap:.1%} above {found.least_bound_s:.4g} s, the least bound of all."
    )
    return Group(
        head,
        f"Recipe: {recipe_text(found.best[0].job.shape, found.best[0].job.recipe)}.",
        "Layouts, fastest first:",
        *(
            f"{number}  {one.layout.text} [{one.job.recipe.implementations.vector}]"
            for number, one in enumerate(found.best, 1)
        ),
        table,
        f"The fastest's step: {parts_text(found.best[0])}.",
        runs_here_line(found),
        foot,
        f"The fastest: {errors[0].sentence}",
        *_dropped_note(found.best[0].layout),
        *memory_notes([one.job for one in found.best]),
    )


def _dropped_note(layout: Layout) -> list[str]:
    """Say how many rows have no room in the experts' capacity."""
    if layout.capacity_factor is None:
        return []
    least, most = layout.dropped_rows
    return [
        f"Experts take at most {layout.capacity_factor:g} times the mean and the busiest rank gets "
        f"{layout.expert_imbalance:g} times, so {least:.1%} to {most:.1%} of the rows that go to "
        "experts are dropped."
    ]


def memory_notes(jobs: Sequence[Job]) -> list[str]:
    """How far the bytes of priced layouts may be off; nothing of those that are planned."""
    priced = [job for job in jobs if not job.is_own]
    if not priced:
        return []
    source, runs = published_memory()
    names: list[Framework] = ["megatron"]
    names += ["torch_fsdp"] if any(job.layout.zero == 3 for job in priced) else []
    told = "; ".join(runs[name].told for name in names if name in runs)
    return [f"Memory is that of tensors: {told} ({source})."]


def runs_here_line(found: SearchResult) -> str:
    """Whether `run` runs the best layout, or why not; and which of the others it does."""
    best, *others = found.best
    why = why_not_here(best.job.shape, best.job.recipe, best.layout)
    if why is None:
        return "The first layout runs here: -o plan.json, then twinstream run plan.json."
    if best.job.is_own:
        return f"twinstream runs the first layout, but not here: {why}."
    own = next((one for one in others if one.job.is_own), None)
    alternative = "" if own is None else f" The fastest shown that it runs: {own.layout.text}."
    return f"twinstream does not run the first layout: {why}.{alternative}"


def parts_text(one: RankedLayout) -> str:
    """Where a layout's step goes: compute, and what compute waits for, mean over ranks."""
    shares = one.prediction.shares
    return ", ".join(f"{cause_name(name)} {share:.1%}" for name, share in shares.items())


def bills_screen(
    names: Sequence[str], bills: Sequence[Bill], errors: Sequence[float | None], num_tokens: float
) -> Group:
    """What a run of so many tokens comes to, with each layout or on one device.

    Args:
        errors: mean errors of the predicted speeds, by which days and money have their ranges.
    """
    table = FittedTable(box=box.SIMPLE, pad_edge=False)
    table.add_column("layout")
    for name in ("training days", "goodput", "days", "GPU-hours", "money"):
        table.add_column(name, justify="right")
    for name, bill, error in zip(names, bills, errors, strict=True):
        table.add_row(
            name,
            f"{bill.run_days:,.4g}",
            "-" if bill.goodput is None else f"{bill.goodput:.1%}",
            range_text(bill.wall_days, error, lambda days: f"{days:,.4g}"),
            f"{bill.gpu_hours:,.4g}" if bill.gpu_hours < 1000 else f"{bill.gpu_hours:,.0f}",
            "-" if bill.money is None else range_text(bill.money, error, money_text),
        )
    told = " Days and money are ranges where the error of the speed is known."
    return Group(f"A run of {num_tokens:.4g} tokens.{told}", table)


def range_text(value: float, error: float | None, text: Callable[[float], str]) -> str:
    """A time or what is paid for it, as the error of a predicted speed leaves it open.

    A speed that is measured at v (1 - e) to v (1 + e) takes t / (1 + e) to t / (1 - e).

    >>> range_text(100.0, 0.25, money_text), range_text(100.0, None, money_text)
    ('80.00 to 133.33', '100.00')
    """
    if error is None:
        return text(value)
    most = "?" if error >= 1.0 else text(value / (1.0 - error))
    return f"{text(value / (1.0 + error))} to {most}"


def money_text(money: float) -> str:
    """In any currency.

    >>> money_text(12.3456), money_text(1234567.8)
    ('12.35', '1,234,568')
    """
    return f"{money:,.0f}" if money >= 1000 else f"{money:,.2f}" if money >= 1 else f"{money:.4g}"
