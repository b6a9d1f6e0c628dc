"""MAD-Max's 37 results: theirs, ours under their assumptions, and what we would say.

python -m benchmarks.accuracy.madmax tests/layered/madmax_runs.json docs/benchmarks/madmax-DATE.csv
"""

import csv
import io
import json
import sys
from dataclasses import replace
from pathlib import Path

from twinstream.hardware_profiles.clusters.loader import load_cluster
from twinstream.layered.estimate import Question
from twinstream.layered.madmax import MadMaxCase, madmax_case, madmax_fields, madmax_step
from twinstream.schedule.files import write_text

_CLUSTER = "a100_40gb"  # eight A100 of 40 GB and eight 200 Gb/s NICs a node, as ZionEX


def row_of(case: MadMaxCase) -> dict[str, object]:
    """Return one result: steps in ms, and of ours what they are made of."""
    same = madmax_fields(madmax_step(case.model, case.strategy, case.system, case.task))
    worst = max(abs(same[key] - value) for key, value in case.printed.items())
    products = "tf32" if case.model.dtype == "float32" else "own"
    model = case.model.model_copy(update={"products": products})
    task = replace(case.task, prefetch=True)
    ours = Question(model, load_cluster(_CLUSTER), case.system.mesh, task).estimate(case.strategy)
    kinds = {kind: round(ns / 1e6, 3) for kind, ns in ours.step.by_kind.items()}
    return {
        "run": case.name, "theirs_ms": case.printed["step_ms"],
        "ours_as_theirs_ms": round(same["step_ms"], 4), "largest_difference_ms": round(worst, 5),
        "we_say_ms": round(ours.step.step_ns / 1e6, 3),
        "we_say_over_theirs": round(ours.step.step_ns / 1e6 / case.printed["step_ms"], 3),
        "theirs_exposed_ms": case.printed["exposed_ms"],
        "our_exposed_ms": round(ours.step.exposed_ns / 1e6, 3),
        **{f"our_{kind}_ms": kinds.get(kind, 0.0) for kind in (
            "products", "lookup", "all_to_all", "all_reduce", "all_gather", "reduce_scatter")},
        "our_memory_gib": round(ours.memory.total / 2**30, 2), "fits": ours.fits,
    }  # fmt: skip


def cases(path: Path) -> list[MadMaxCase]:
    """Return the runs of a fixture, whose system is that of all but for what a run says."""
    found = json.loads(path.read_text(encoding="utf-8"))
    whole = found["system"]
    return [madmax_case({**run, "system": {**whole, **run["system"]}}) for run in found["runs"]]


if __name__ == "__main__":
    rows = [row_of(case) for case in cases(Path(sys.argv[1]))]
    for row in rows:
        print(row["run"], row["theirs_ms"], row["ours_as_theirs_ms"], row["we_say_ms"])
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(text.getvalue(), Path(sys.argv[2]))
