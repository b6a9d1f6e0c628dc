"""`plan`: decide where every tensor lives, and predict what that yields."""

import time
from pathlib import Path
from typing import Annotated

from twinstream import api
from twinstream.commands import options
from twinstream.commands.output import print_json, print_report, progress
from twinstream.hardware_profiles.loader import load_machine
from twinstream.metrics import summarize
from twinstream.planner.chunking import TrainingStep
from twinstream.schedule.document import Schedule
from twinstream.schedule.files import write_document
from twinstream.tables import summary_table


def plan(  # noqa: PLR0913
    model: options.Model,
    machine: options.Machine,
    seq_len: options.SeqLen,
    tokens_per_step: options.TokensPerStep = None,
    chunk_tokens: options.ChunkTokens = None,
    chunks_per_round: options.ChunksPerRound = None,
    device_mem: options.DeviceMem = None,
    host_mem: options.HostMem = None,
    policy: options.Policy = None,
    output: Annotated[Path | None, options.output("Write the schedule here.")] = None,
    as_json: options.Json = False,
) -> None:
    """Plan a training step within memory caps and predict its speed."""
    wanted = options.PlanOptions(
        model, machine, seq_len, tokens_per_step, chunk_tokens, chunks_per_round,
        device_mem, host_mem, policy,
    )  # fmt: skip
    schedule, plan_seconds = planned(wanted, quiet=as_json)
    with progress("simulating", quiet=as_json):
        timeline = api.simulate(schedule, machine)
    summary = summarize(schedule, timeline, load_machine(machine), plan_seconds)
    if output is not None:
        write_document(schedule, output)
    if as_json:
        print_json(summary.model_dump() | describe(schedule))
    else:
        print_report(summary_table(summary, schedule, schedule.machine.name))
        if output is not None:
            print_report(f"Wrote the schedule to {output}.")


def planned(wanted: options.PlanOptions, *, quiet: bool) -> tuple[Schedule, float]:
    """The schedule asked for, and the seconds it took to plan."""
    assert wanted.model is not None and wanted.machine is not None and wanted.seq_len is not None
    step = TrainingStep(
        wanted.seq_len, wanted.tokens_per_step, wanted.chunk_tokens, wanted.chunks_per_round
    )
    start_s = time.perf_counter()
    with progress(f"planning {wanted.model} for {wanted.machine}", quiet=quiet):
        schedule = api.plan(
            wanted.model,
            wanted.machine,
            step=step,
            device_mem=wanted.device_mem,
            host_mem=wanted.host_mem,
            policy=wanted.policy or api.DEFAULT_POLICY,
        )
    return schedule, time.perf_counter() - start_s


def describe(schedule: Schedule) -> dict[str, object]:
    """What a schedule is about, for JSON."""
    return {
        "model": schedule.model.name,
        "machine": schedule.machine.name,
        "policy": schedule.policy,
        "num_ops": len(schedule.ops),
        "workload": schedule.workload,
        "caps": schedule.caps,
        "bound": schedule.bound,
    }
