"""What the rows of the quality matrix say, as Markdown."""

from collections.abc import Callable, Iterable, Sequence
from math import ceil
from statistics import mean, median

from benchmarks.quality.matrix_cells import state_gib
from benchmarks.quality.matrix_row import KEY_COLUMNS, Row, other_policies
from twinstream.planner.policies import optimizer_place

TARGETS = "targets: gap_family median <= 1 %, p95 <= 5 %"
_SAME = 1e-7  # figures in the file have nine digits
_SLOWER = 1.03


def summary(rows: Sequence[Row]) -> str:
    """Counts, gaps, the worst ten, who is below the bound or faster, arenas, plan seconds."""
    planned = [row for row in rows if row["status"] == "ok"]
    if not planned:
        return f"{len(rows)} cells, none planned"
    parts = (
        _counts(rows),
        _gaps(planned),
        "Worst ten by gap_family:\n\n" + _table(_worst(planned, "gap_family")),
        _below_bound(planned),
        _faster(planned),
        _arenas(planned),
        _seconds(rows),
        _failures(rows),
    )
    return "\n\n".join(part for part in parts if part)


def against(rows: Sequence[Row], before: Sequence[Row]) -> str:
    """Step times, gaps and plan seconds of the cells that an older file has planned, too."""
    older = {_key(row): row for row in before if row["status"] == "ok"}
    pairs = [(row, older[_key(row)]) for row in rows if row["status"] == "ok" if _key(row) in older]
    lost = [row for row in rows if row["status"] != "ok" and _key(row) in older]
    if not pairs:
        return "No cell is planned in both files."
    ratios = [float(row["step_s"]) / float(old["step_s"]) for row, old in pairs]
    gaps = [[float(pair[i]["gap_family"]) for pair in pairs] for i in range(2)]
    seconds = [[float(pair[i]["plan_seconds"]) for pair in pairs] for i in range(2)]
    sooner = sum(new < old for new, old in zip(*seconds, strict=True))
    slower = sorted(zip(ratios, pairs, strict=True), key=lambda found: -found[0])
    return "\n".join(
        [
            f"Against the older file, {len(pairs)} cells:",
            "",
            f"- step time: median {median(ratios) - 1:+.2%}, mean {mean(ratios) - 1:+.2%}, "
            f"best {min(ratios) - 1:+.2%}, worst {max(ratios) - 1:+.2%}",
            f"- gap_family: median {median(gaps[0]):.2%}, p95 {quantile(gaps[0], 0.95):.2%}; "
            f"before {median(gaps[1]):.2%}, {quantile(gaps[1], 0.95):.2%}",
            f"- planned in less time in {sooner} of {len(pairs)}; {sum(seconds[0]):.0f} s in all, "
            f"before {sum(seconds[1]):.0f} s",
            f"- no longer planned: {', '.join(map(_cell, lost)) or 'none'}",
            "",
            f"More than {_SLOWER - 1:.0%} slower:",
            "",
            *(
                f"- {_cell(row)}: {float(row['step_s']):.3f} s, {ratio - 1:+.2%}; "
                f"{_cut(row)}, before {_cut(old)}"
                for ratio, (row, old) in slower
                if ratio > _SLOWER
            ),
        ]
    )


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ranked = sorted(values)
    return ranked[max(0, ceil(share * len(ranked)) - 1)]


def faster_than_optimal(rows: Iterable[Row], policies: Iterable[str]) -> list[tuple[Row, str]]:
    """Cells, and the policies that take less time there than `optimal`."""
    names = tuple(policies)
    return [
        (row, policy)
        for row in rows
        for policy in names
        if row["status"] == "ok" and row[policy]
        if float(row[policy]) < float(row["step_s"]) * (1 - _SAME)
    ]


def _counts(rows: Sequence[Row]) -> str:
    by_status: dict[str, int] = {}
    for row in rows:
        by_status[row["status"]] = by_status.get(row["status"], 0) + 1
    counts = ", ".join(f"{count} {status}" for status, count in sorted(by_status.items()))
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    return f"{len(rows)} cells: {counts}; commit {commits}; {TARGETS}"


def _gaps(rows: Sequence[Row]) -> str:
    lines = ["| above the bound | median | p95 | worst |", "|---|---|---|---|"]
    groups: list[tuple[str, Sequence[Row], str]] = [
        ("gap (own chain)", rows, "gap"),
        ("gap_family", rows, "gap_family"),
    ]
    for axis in ("machine", "model"):
        names = sorted({row[axis] for row in rows})
        groups += [
            (f"gap_family, {name}", [row for row in rows if row[axis] == name], "gap_family")
            for name in names
        ]
    tight = [row for row in rows if float(row["device_gib"]) < 0.25 * state_gib(row["model"])]
    if tight:
        groups.append(("gap_family, device below a quarter of the state", tight, "gap_family"))
    for name, some, column in groups:
        gaps = [float(row[column]) for row in some]
        figures = median(gaps), quantile(gaps, 0.95), max(gaps)
        shown = " | ".join(f"{gap:.2%}" for gap in figures)
        lines.append(f"| {name} ({len(some)}) | {shown} |")
    return "\n".join(lines)


def _worst(rows: Sequence[Row], column: str, count: int = 10) -> list[Row]:
    return sorted(rows, key=lambda row: -float(row[column]))[:count]


_SHOWN: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("cell", lambda row: _cell(row)),
    ("rounds x chunks x tokens", lambda row: _cut(row)),
    ("step s", lambda row: f"{float(row['step_s']):.3f}"),
    ("gap", lambda row: f"{float(row['gap']):.2%}"),
    ("gap_family", lambda row: f"{float(row['gap_family']):.2%}"),
    ("limits", lambda row: row["limits"]),
    ("MFU", lambda row: f"{float(row['mfu']):.1%}"),
    ("recompute", lambda row: f"{float(row['recompute_fraction']):.1%}"),
)


def _table(rows: Iterable[Row]) -> str:
    head = "| " + " | ".join(name for name, _ in _SHOWN) + " |\n" + "|---" * len(_SHOWN) + "|"
    lines = ["| " + " | ".join(shown(row) for _, shown in _SHOWN) + " |" for row in rows]
    return "\n".join([head, *lines])


def _cell(row: Row) -> str:
    machine, model, seq_len, device, host = (row[name] for name in KEY_COLUMNS)
    return f"{machine} {model} {int(seq_len):,} {device} + {host} GiB"


def _key(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in KEY_COLUMNS)


def _cut(row: Row) -> str:
    return f"{row['rounds_per_step']} x {row['chunks_per_round']} x {row['chunk_tokens']}"


def below_bound(rows: Iterable[Row]) -> list[tuple[Row, str]]:
    """Cells and the step times, by column, that are below the bound of their chain."""
    return [
        (row, column)
        for row in rows
        for column in ("step_s", *on_same_chain())
        if row["status"] == "ok" and row[column]
        if float(row[column]) < float(row["bound_s"]) * (1 - _SAME)
    ]


def on_same_chain() -> list[str]:
    """The other policies that run the chain of `optimal`."""
    return [name for name in other_policies() if optimizer_place(name) == "device"]


def _below_bound(rows: Sequence[Row]) -> str:
    columns = ("step_s", *on_same_chain())
    count = sum(bool(row[column]) for row in rows for column in columns)
    found = [f"{_cell(row)}: {column}" for row, column in below_bound(rows)]
    return f"Of {count} step times below their chain's bound: {', '.join(found) or 'none'}"


def _faster(rows: Sequence[Row]) -> str:
    on_cpu = [name for name in other_policies() if optimizer_place(name) != "device"]
    parts = (
        ("Another policy is faster on the same chain (must be none)", on_same_chain()),
        ("A policy with its optimizer on the CPU is faster", on_cpu),
    )
    return "\n\n".join(_faster_list(title, rows, names) for title, names in parts)


def _faster_list(title: str, rows: Sequence[Row], policies: Sequence[str]) -> str:
    compared = sum(bool(row[name]) for row in rows for name in policies)
    lines = [f"{title}, of {compared} comparisons with {', '.join(policies)}:", ""]
    for row, name in faster_than_optimal(rows, policies):
        ratio = float(row["step_s"]) / float(row[name]) - 1
        lines.append(f"- {_cell(row)}: {name} {float(row[name]):.3f} s, optimal {ratio:.2%} more")
    return "\n".join(lines if lines[2:] else [*lines, "none"])


def _arenas(rows: Sequence[Row]) -> str:
    told = []
    for column in ("extent_issue", "extent_timed"):
        worst = _worst(rows, column, 1)[0]
        ratios = [float(row[column]) for row in rows]
        told.append(
            f"- {column}: median {median(ratios):.3f}, p95 {quantile(ratios, 0.95):.3f}, worst "
            f"{max(ratios):.3f} ({_cell(worst)}), above 1.03 in {sum(r > 1.03 for r in ratios)}"
        )
    return "Device arena / live peak:\n\n" + "\n".join(told)


def _seconds(rows: Sequence[Row]) -> str:
    timed = [row for row in rows if row["plan_seconds"]]
    seconds = [float(row["plan_seconds"]) for row in timed]
    slowest = max(timed, key=lambda row: float(row["plan_seconds"]))
    return (
        f"Seconds to plan: median {median(seconds):.1f}, p95 {quantile(seconds, 0.95):.1f}, "
        f"max {max(seconds):.1f} ({_cell(slowest)}), total {sum(seconds):.0f}"
    )


def _failures(rows: Sequence[Row]) -> str:
    lines = [
        f"- {_cell(row)}: {row['status']}: {row['message']}"
        for row in rows
        if row["status"] != "ok"
    ]
    return "Without a plan:\n\n" + "\n".join(lines) if lines else ""
