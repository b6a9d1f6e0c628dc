"""`whatif`: what throughput hangs on, and what would reach a target."""

import os
from pathlib import Path
from typing import Annotated

import typer

from twinstream import api
from twinstream.commands.arguments import options
from twinstream.commands.output import print_json, print_report, progress
from twinstream.commands.plans.planning import dtype_notes, spec_of, step_of
from twinstream.hardware_profiles.loader import load_machine
from twinstream.planner.choices import Choices
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import write_text
from twinstream.whatif.question import Question, question_of
from twinstream.whatif.target import check_target

_MOST_CHANGE = 100.0


class ChangesError(TwinstreamError):
    """Changes that cannot be read."""


def whatif(  # noqa: PLR0913
    model: options.Model,
    machine: options.Machine,
    seq_len: options.SeqLen,
    tokens_per_step: options.TokensPerStep = None,
    optimizer_overhead: options.OptimizerOverhead = None,
    chunk_tokens: options.ChunkTokens = None,
    chunks_per_round: options.ChunksPerRound = None,
    device_mem: options.DeviceMem = None,
    host_mem: options.HostMem = None,
    policy: options.Policy = None,
    kernels: options.Kernels = None,
    attention: options.Attention = None,
    nondeterministic: options.Nondeterministic = False,
    dtype: options.Dtype = None,
    effort: options.EffortOfPlan = None,
    changes: Annotated[
        str, typer.Option(metavar="LIST", help="How much each property changes.")
    ] = "-50%,-10%,+10%,+100%",
    target: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="Search the smallest memory or link for 12000tok/s, or for 95% of what compute "
            "alone could do.",
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Processes; by default one a core.")
    ] = None,
    output: Annotated[
        Path | None, options.output("Write a page with a tornado chart here.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Say what throughput hangs on: plan again with each cap and machine number changed.

    With --target, search the smallest device memory, host memory or link that reaches it.
    """
    wanted = options.PlanOptions(
        model, machine, seq_len, tokens_per_step, optimizer_overhead, chunk_tokens,
        chunks_per_round, device_mem, host_mem, policy, kernels, attention,
        nondeterministic=nondeterministic, dtype=dtype,
    )  # fmt: skip
    if target is not None and output is not None:
        raise ChangesError("-o writes the chart of changes, which --target does not make")
    num_jobs = jobs or os.cpu_count() or 1
    factors = changes_of(changes)
    if target is not None:
        check_target(target)
    with progress(f"planning {model} for {machine}", quiet=as_json):
        question = _question(wanted, effort)
    if not as_json:
        print_report(*dtype_notes(wanted))
    if target is not None:
        _search(question, target, num_jobs, as_json=as_json)
    else:
        _vary(question, factors, num_jobs, output, as_json=as_json)


def changes_of(text: str) -> tuple[float, ...]:
    """
    >>> changes_of("-50%, +100%")
    (-0.5, 1.0)

    Raises:
        ChangesError: the text is no such list.
    """
    found = []
    for part in text.split(","):
        try:
            change = float(part.strip().removesuffix("%")) / 100 if "%" in part else float(part)
        except ValueError:
            change = -1.0
        if change >= 1 and "%" not in part:
            raise ChangesError(
                f"the change '{part.strip()}' has no %: write {change:g}% or {100 * change:g}%"
            )
        if not -1.0 < change <= _MOST_CHANGE or change == 0:
            raise ChangesError(
                f"cannot read the change '{part.strip()}'; write a list as -50%,-10%,+10%,+100% "
                "(more than -100%, and not 0)"
            )
        found.append(change)
    if len(set(found)) < len(found):
        raise ChangesError(f"'{text}' names a change twice")
    return tuple(found)


def _question(wanted: options.PlanOptions, effort: str | None) -> Question:
    assert wanted.model is not None and wanted.machine is not None
    profile, policy = load_machine(wanted.machine), wanted.policy or api.DEFAULT_POLICY
    return question_of(
        spec_of(wanted), profile, step_of(wanted),
        api.caps_of(profile, wanted.device_mem, wanted.host_mem),
        policy, Choices.of_effort(policy, effort),
    )  # fmt: skip


def _vary(
    question: Question,
    changes: tuple[float, ...],
    num_jobs: int,
    output: Path | None,
    *,
    as_json: bool,
) -> None:
    from twinstream.whatif.screen import what_if_html, what_if_screen
    from twinstream.whatif.sensitivity import num_plans, what_if

    with progress("planning again", num_plans(question, changes), quiet=as_json) as advance:
        found = what_if(question, changes, num_jobs, advance)
    if output is not None:
        write_text(what_if_html(found, question), output)
    if as_json:
        print_json(found)
        return
    print_report(what_if_screen(found, question))
    if output is not None:
        print_report(f"Wrote {output}.")


def _search(question: Question, target: str, num_jobs: int, *, as_json: bool) -> None:
    from twinstream.whatif.screen import target_screen
    from twinstream.whatif.target import num_searches, search_target

    told = f"planning {question.spec.name} for {question.machine.name} as it is"
    with progress(told, quiet=as_json):
        planned = question.planned()
    told = "searching what reaches the target (quick plans, then confirmed)"
    with progress(told, num_searches(question), quiet=as_json) as advance:
        found = search_target(question, planned, target, num_jobs, advance)
    if as_json:
        print_json(found)
    else:
        print_report(target_screen(found, question))
