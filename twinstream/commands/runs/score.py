"""`score`: the log-probabilities of data by a model, within whatever memory there is."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import exp, inf
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from twinstream.commands.arguments import options
from twinstream.commands.arguments.grouped import let_typer_see, options_of
from twinstream.commands.arguments.outputs import check_output
from twinstream.commands.output import print_json, print_report
from twinstream.measures.explanation import explain
from twinstream.measures.metrics import rate_text
from twinstream.measures.uncertainty import uncertainty_of
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import write_lines
from twinstream.screens.live import duration
from twinstream.screens.plan_screen import residence_table
from twinstream.screens.tables import seconds, workload_line
from twinstream.training.options import TrainOptions
from twinstream.training.scoring import SCORED, Scorer, score_options, scored, scorer_of


@dataclass
class Scored:
    """The figures of a whole set of data.

    Attributes:
        tokens: that were computed, `targets` those that had a log-probability.
        log_prob: the sum over all targets, in nats.
        predicted_tokens_per_s: of full passes; the data's documents leave some padding.
        seconds: of reading, computing and writing.
    """

    documents: int = 0
    cut: int = 0
    tokens: int = 0
    targets: int = 0
    log_prob: float = 0.0
    predicted_tokens_per_s: float = 0.0
    seconds: float = 0.0

    @property
    def perplexity(self) -> float:
        """exp of the mean loss of a target; infinite where that is beyond a float."""
        try:
            return exp(-self.log_prob / max(1, self.targets))
        except OverflowError:
            return inf


def score(**given: Any) -> None:
    """Score DATA by MODEL: the log-probability of each token that training would predict.

    MODEL and DATA are as `train` takes them; -o FILE has a line of JSON for each document, in the
    order of the files. Weights stream through the device's memory where they do not fit.
    """
    inputs, output = given.pop("inputs") or [], given.pop("output")
    dry_run, as_json = given.pop("dry_run"), given.pop("as_json")
    with_tokens = given.pop("each_token")
    if len(inputs) < 2:
        raise TwinstreamError(
            "MODEL and DATA are to be given: twinstream score MODEL DATA... -o scores.jsonl"
        )
    flags = {name: value for name, value in given.items() if value not in (None, [], ())}
    scorer = scorer_of(score_options(inputs[0], inputs[1:], flags), "log_probs", tell=_tell)
    found = Scored(predicted_tokens_per_s=scorer.plan.tokens_per_s)
    if not as_json:
        _show_plan(scorer)
    if not dry_run:
        start_s = perf_counter()
        lines = _lines(scorer, found, with_tokens=with_tokens)
        if output is None:
            for _ in lines:
                pass
        else:
            write_lines(lines, output)
        found.seconds = perf_counter() - start_s
    if as_json:
        print_json(asdict(found) | {"perplexity": found.perplexity if found.targets else None})
    elif not dry_run:
        _show_result(found, output)


def _lines(scorer: Scorer, found: Scored, *, with_tokens: bool) -> Iterator[str]:
    """Yield a line for each document, which is counted."""
    for one in scored(scorer):
        found.documents += 1
        found.cut += one.parts > 1
        found.tokens += one.tokens
        found.targets += one.targets
        found.log_prob += one.log_prob
        yield one.as_json(with_tokens=with_tokens)


def _show_plan(scorer: Scorer) -> None:
    plan, machine = scorer.plan, scorer.here.machine
    explanation = explain(plan.schedule, plan.predicted, machine)
    error = uncertainty_of(machine, plan.schedule).short
    tokens = scorer.data.epoch_tokens
    print_report(
        f"{scorer.model.spec.name} on {machine.name}: it fits",
        f"a pass     {plan.tokens_per_step:,} tokens: {workload_line(plan.workload)}",
        f"predicted  {rate_text(plan.tokens_per_s)} tokens/s, {seconds(plan.step_s)} a pass "
        f"({error})",
        f"in all     about {tokens:,} tokens: {duration(tokens / plan.tokens_per_s)}",
        residence_table(explanation.residence, plan.schedule.caps),
    )


def _show_result(found: Scored, output: Path | None) -> None:
    mean = -found.log_prob / max(1, found.targets)
    lines = [
        f"{found.documents:,} documents, {found.targets:,} targets: loss {mean:.4f} a token, "
        f"perplexity {found.perplexity:,.4g}",
        f"{found.tokens:,} tokens in {duration(found.seconds)}, "
        f"{rate_text(found.tokens / max(1e-9, found.seconds))} tokens/s, reading and writing "
        f"included ({rate_text(found.predicted_tokens_per_s)} predicted of full passes)",
    ]
    if found.cut:
        lines.append(
            f"{found.cut:,} documents are longer than --seq-len and were scored in pieces, none of "
            "which sees what stands before it: give a larger --seq-len"
        )
    if output is not None:
        lines.append(f"Wrote {output}.")
    print_report(*lines)


def _tell(line: str) -> None:
    typer.echo(line, err=True)


_INPUTS = Annotated[list[str] | None, typer.Argument(metavar="MODEL DATA...", show_default=False)]
_OUTPUT = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="A line of JSON for each document.",
                 callback=check_output),
]  # fmt: skip
_EACH_TOKEN = Annotated[
    bool, typer.Option("--each-token", help="Write the log-probability of each token, too.")
]
let_typer_see(
    score,
    {
        "inputs": (_INPUTS, None), "output": (_OUTPUT, None), "each_token": (_EACH_TOKEN, False),
        "dry_run": (options.DryRun, False), "as_json": (options.Json, False),
    },
    (one for one in options_of(TrainOptions) if one[0] in SCORED),
)  # fmt: skip
