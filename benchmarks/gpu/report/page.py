"""The table as a page of documentation, with times by kind against their floors."""

from collections.abc import Iterable, Sequence

from benchmarks.gpu.jobs.results import AttentionChecked, CheckFound, Results, TrainFound
from benchmarks.gpu.report.table import CellRow, JobRow, PeerRow, Table
from twinstream.executor.run.device_state import DeviceState

_BOUND_GOAL = 0.95
_ABOVE_BOUND = 1.005  # further than noise


def markdown_of(results: Results, table: Table) -> str:
    """The table as a page of documentation."""
    where = results.where
    lines = [
        f"# Campaign on {where.device}, {where.date}",
        "",
        f"Driver {where.driver}, torch {where.torch}, commit {where.commit or 'not given'}, size "
        f"`{results.size}`. `{where.command}`",
        "",
        *_probe_lines(table),
        *_train_lines(table.train),
        *_without_lines(table.without),
        *_kind_lines(table.cells),
        *_peer_lines(table.peers),
        *_cell_lines(table.cells),  # last, where a call's answer is cut off before
    ]
    return "\n".join(lines) + "\n"


def _probe_lines(table: Table) -> list[str]:
    lines = [f"- {name}: {told}" for name, told in table.facts.facts.items()] if table.facts else []
    lines += [""] if lines else []
    if table.check is not None:
        lines += [*(f"- {line}" for line in check_lines(table.check)), ""]
    for what, tests in (("First tests", table.smoke), ("Tests", table.tests)):
        if tests is None:
            continue
        left = "" if tests.complete else "; not all were reached"
        lines += [f"{what} marked gpu: {tests.passed} passed, {tests.failed} failed, "
                  f"{tests.skipped} skipped{left}.", ""]  # fmt: skip
        lines += [f"- {failure}" for failure in tests.failures]
        lines += [""] if tests.failures else []
    if table.kernels is not None:
        notes = table.kernels.notes
        lines += [f"- {note}" for note in notes] + ([""] if notes else [])
    if table.probe is not None:
        probe = table.probe
        off = sorted(abs(sample.ratio - 1.0) for sample in probe.samples)
        median, worst = (off[len(off) // 2], off[-1]) if off else (0.0, 0.0)
        fit = f", median error of the fit {median:.1%}, worst {worst:.1%}" if off else ""
        bits = "" if probe.kernels.deterministic else " (not deterministic)"
        lines += [f"Profile `{probe.machine}` ({probe.content_hash}): {len(probe.samples)} kernels "
                  f"timed{fit}; kernels: vector {probe.kernels.vector}, attention "
                  f"{probe.kernels.attention}{bits}.", ""]  # fmt: skip
        if probe.sustained_flop_per_s is not None:
            rate = probe.sustained_flop_per_s / 1e12
            lines += [f"Sustained: {rate:.0f} TFLOP/s, at {_state(probe.sustained)}.", ""]
    return lines


def check_lines(found: CheckFound) -> list[str]:
    """What the check came to, a line an attention; of links only why they have no figures."""
    unsteady = [f"links have no figures: {found.unsteady}"] if found.unsteady else []
    return [*unsteady, *map(checked_line, found.attention)]


def checked_line(found: AttentionChecked) -> str:
    """What an attention came to on one shape."""
    sequences = f"{found.num_sequences} of {found.seq_len:,} tokens"
    what = f"{found.name}, head_dim {found.head_dim}, {sequences}"
    if found.backward_flop_per_s is None or found.forward_ns is None or found.backward_ns is None:
        return f"{what}: {found.refused}"
    bits = "same bits twice" if found.same_bits else "OTHER BITS THE SECOND TIME"
    return (
        f"{what}: {bits}, error {found.error:.1e}, forward {found.forward_ns / 1e6:.2f} ms, "
        f"backward {found.backward_ns / 1e6:.2f} ms, {found.backward_flop_per_s / 1e12:.3g} TFLOP/s"
    )


def _train_lines(found: TrainFound | None) -> list[str]:
    if found is None:
        return []
    evals = ", ".join(f"{loss:.3f}" for loss in found.eval_losses)
    predicted = found.predicted_tokens_per_s
    beside = "" if predicted is None else f" ({predicted:,.0f} predicted)"
    return [
        f"`twinstream train`: {len(found.losses)} steps, loss {found.losses[0]:.3f} to "
        f"{found.losses[-1]:.3f}, evaluated {evals}; {found.tokens_per_s:,.0f} tokens/s{beside}; "
        f"checkpoint of {found.checkpoint_bytes / 1e9:.2f} GB in {found.checkpoint_s:.1f} s.",
        "",
    ]


def _cell_lines(rows: Sequence[CellRow]) -> list[str]:
    if not rows:
        return ["No cell has been measured.", ""]
    head = ("cell", "rounds", "predicted tok/s", "measured", "error", "bound", "of bound", "goal",
            "MFU", "HFU", "device GiB (driver / cap)", "host GiB", "host us/op", "extension",
            "clock, power", "loss")  # fmt: skip
    body = [
        (
            row.cell,
            row.workload.split(",")[0],
            f"{row.predicted_tokens_per_s:,.0f}",
            _measured(row),
            f"{row.error:+.1%}",
            f"{row.bound_tokens_per_s:,.0f}",
            _of_bound(row),
            _goal(row),
            f"{row.mfu:.1%}",
            f"{row.hfu:.1%}",
            f"{_gib(row.device_used_gib)} / {_gib(row.device_cap_gib)}",
            f"{row.host_arena_gib:.1f}",
            "-" if row.host_us_per_op is None else f"{row.host_us_per_op:.0f}",
            _extension(row),
            _state(row.state),
            f"{row.loss:.3f}",
        )
        for row in rows
    ]
    return [
        "## Cells",
        "",
        "Predicted by the simulator on the profile above, before the run. Error is predicted / "
        "measured - 1 of the step time. Bound is the plan's own lower bound on that profile; the "
        "goal is 95 % of it, and more than 100 % says that the profile has the device too slow. "
        "Measured is the whole step where it was run, else extended from short passes, ± one "
        "standard deviation of that. "
        "Extension is what extending short passes gives over the whole step, - 1: of "
        "predictions, and of measurements where the whole step was run.",
        "",
        *_table(head, body),
        "",
    ]


def _measured(row: CellRow) -> str:
    spread = "" if row.spread is None else f" ± {row.spread:.1%}"
    return f"{row.measured_tokens_per_s:,.0f}{spread}"


def _state(state: DeviceState | None) -> str:
    if state is None:
        return "not read"
    known = (("MHz", state.sm_clock_mhz), ("W", state.power_w), ("C", state.temperature_c))
    told = [f"{value:.0f} {unit}" for unit, value in known if value is not None]
    return ", ".join([*told, *state.held_back])


def _of_bound(row: CellRow) -> str:
    """Nothing is faster than the bound, but a device may be faster than its profile."""
    told = f"{row.of_bound:.1%}"
    if row.of_bound > _ABOVE_BOUND:
        return f"{told} (profile too slow)"
    return f"{told} ✓" if row.of_bound >= _BOUND_GOAL else told


def _goal(row: CellRow) -> str:
    if row.goal_tokens_per_s is None:
        return "-"
    reached = row.measured_tokens_per_s >= row.goal_tokens_per_s
    return f"{row.goal_tokens_per_s:,.0f}{' ✓' if reached else ''}"


def _extension(row: CellRow) -> str:
    whole = "" if row.whole_error is None else f"; measured {row.whole_error:+.1%}"
    return f"{row.extension_error:+.1%}{whole}"


def _peer_lines(rows: Sequence[PeerRow]) -> list[str]:
    if not rows:
        return []
    head = ("peer", "tok/s", "our cell", "ours / peer", "device GiB (driver)", "micro-batch s",
            "update s", "loss")  # fmt: skip
    body = [
        (
            row.peer,
            f"{row.tokens_per_s:,.0f}",
            row.beside,
            "-" if row.ours_over_peer is None else f"{row.ours_over_peer:.2f}",
            _gib(row.device_used_gib),
            f"{row.micro_batch_s:.3f}",
            f"{row.update_s:.3f}",
            f"{row.loss:.3f}",
        )
        for row in rows
    ]
    return ["## Peers", "", "The same sizes, tokens and dtype in plain PyTorch "
            "(`benchmarks/gpu/peers/`).", "", *_table(head, body), ""]  # fmt: skip


def _kind_lines(rows: Sequence[CellRow]) -> list[str]:
    body = [
        (
            row.cell,
            kind.name,
            f"{kind.num_ops:,}",
            f"{kind.floor_ns / 1e6:,.1f}",
            f"{kind.predicted_ns / 1e6:,.1f}",
            f"{kind.measured_ns / 1e6:,.1f}",
            f"{kind.measured_ns / kind.floor_ns:.2f}" if kind.floor_ns else "-",
        )
        for row in rows
        for kind in row.kinds
    ]
    if not body:
        return []
    head = ("cell", "kind", "ops", "floor ms", "predicted ms", "measured ms", "measured / floor")
    told = (
        "Of the longer short pass. The floor is FLOPs at the best matrix rate probed or bytes at "
        "the probed rate of HBM or link, whichever is longer."
    )
    return ["## Times by kind", "", told, "", *_table(head, body), ""]


def _without_lines(rows: Sequence[JobRow]) -> list[str]:
    if not rows:
        return []
    body = [(row.job, row.status, row.reason.replace("|", "/").replace("\n", " ")) for row in rows]
    return ["## Without figures", "", *_table(("job", "status", "why"), body), ""]


def _gib(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _table(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    rows = [head, ["---"] * len(head), *body]
    return ["| " + " | ".join(row) + " |" for row in rows]
