"""`fit`: what a card can do with a model."""

import os
from collections.abc import Sequence
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from twinstream.commands.arguments.grouped import grouped
from twinstream.commands.arguments.options import Json
from twinstream.commands.arguments.outputs import output_option
from twinstream.commands.output import filled_in, print_json, print_report
from twinstream.cost.bill import price_at, prices_of
from twinstream.hardware_profiles.clusters.loader import place_names
from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.loss import kind_of_loss, loss_of, names_loss
from twinstream.options.option_group import (
    DATA,
    RUN,
    STEPS,
    TRAINED,
    WHERE,
    OptionGroup,
    flag,
    same_flag,
)
from twinstream.options.plan_options import PlanOptions
from twinstream.options.recipe_options import RecipeOptions
from twinstream.options.step_options import StepOptions
from twinstream.planner.choices import Effort
from twinstream.planner.request import with_drive
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import write_text
from twinstream.schedule.sizes import parse_bytes, parse_number
from twinstream.study.fit.cells import LENGTHS, LORA, TOKENS_PER_STEP, FitQuestion, OwnLengths
from twinstream.training.options import BYTES, TrainOptions

if TYPE_CHECKING:
    from twinstream.study.fit.cells import FitTable

_THOUSAND = 1024  # of a length such as 8k
_LONGEST = 2**30
_LENGTHS = ",".join(f"{each // _THOUSAND}k" for each in LENGTHS)
_MOST_GPUS = 64  # of one machine
_GRAIN = 128  # tokens that the data's longest document is rounded up to


class FitError(TwinstreamError):
    """An option of `fit` that cannot be used."""


class FitOptions(OptionGroup):
    """Machines and memories to plan for, and how each cell is asked."""

    machine: tuple[str, ...] = flag(
        WHERE, "NAME|FILE", "A machine to plan for; may be given again.", ()
    )
    gpus: str = flag(WHERE, "LIST", "Numbers of GPUs of a machine: 1,2,4,8.", "1")
    device_mem: str | None = same_flag(StepOptions, "device_mem")
    host_mem: str | None = same_flag(StepOptions, "host_mem")
    disk_mem: str | None = same_flag(StepOptions, "disk_mem")
    disk_bandwidth: str | None = flag(
        WHERE, "SIZE/s", "Rates of a drive, 7GB/s,5GB/s: every cell of one GPU is planned with it, "
        "too.",
    )  # fmt: skip
    optimizer: Literal["host", "auto"] | None = flag(
        WHERE, "WHERE", "Updates, of one GPU without a drive, without clipping: host (its CPU), or "
        "auto (each group where that is faster); by default the device's.", rare=True,
    )  # fmt: skip
    seq_len: str = flag(STEPS, "LIST", "Lengths: 2k,8k,32k or tokens.", _LENGTHS)
    tokens_per_step: int = flag(
        STEPS, "N", "Tokens of a step, the same in every cell.", TOKENS_PER_STEP, ge=1, le=_LONGEST
    )
    tokens: int | None = flag(DATA, "N", "Tokens of the data, in place of DATA.", ge=1, le=2**60)
    tokenizer: Path | None = same_flag(TrainOptions, "tokenizer")
    chat_template: Path | None = same_flag(TrainOptions, "chat_template")
    columns: str | None = same_flag(TrainOptions, "columns")
    lora: str = same_flag(RecipeOptions, "lora", LORA)
    loss: str | None = flag(
        TRAINED, "dpo", "dpo asks about pairs; beta=0.1 and label_smoothing=0 behind commas."
    )
    price: tuple[str, ...] = flag(
        WHERE, "[MACHINE=]PRICE,...",
        "Price of an hour of one GPU, in any currency; or of each machine, as h100=2.5,b200=6. May "
        "be given again.", (),
    )  # fmt: skip
    effort: Effort = same_flag(PlanOptions, "effort", "quick")
    jobs: int | None = flag(RUN, "N", "Processes; by default one a core.", ge=1)

    def question(self, model: str, data: list[str]) -> FitQuestion:
        """
        Raises:
            TwinstreamError: an option cannot be used.
        """
        machines = self.machine
        if not machines:
            raise FitError("name at least one machine: --machine rtx4090 (twinstream machines)")
        if data and self.tokens is not None:
            raise FitError("--tokens is in place of DATA: leave one out")
        for name, size in (("--device-mem", self.device_mem), ("--host-mem", self.host_mem)):
            if size is not None and parse_bytes(size, whole_bytes=2.0**50) < 1:
                raise FitError(f"{name} {size} is no memory: give a size such as 24GiB")
        if self.loss is not None and not names_loss(self.loss):
            raise FitError(f"--loss '{self.loss}': only dpo is asked about, with --loss dpo")
        loss_of(self.loss)
        if self.disk_bandwidth is not None:
            with_drive(load_machine(machines[0]), self.disk_bandwidth)
        elif self.disk_mem is not None:
            raise FitError("--disk-mem is of a drive: give its rates, --disk-bandwidth 7GB/s,5GB/s")
        lengths, own, told = lengths_of(self.seq_len), None, self.tokens
        if data:
            own, told = self._own_lengths(model, data, max(lengths))
        return FitQuestion(
            model, machines, _numbers(self.gpus), lengths, self.tokens_per_step, self.lora,
            self.device_mem, self.host_mem, own, told, prices_by_machine(self.price, machines),
            join([*data, *self._of_data]) if data else "DATA", self.loss,
            counts_bytes=bool(data) and self.tokenizer == Path(BYTES),
            disk_mem=self.disk_mem, disk_bandwidth=self.disk_bandwidth,
            optimizer=self.optimizer,
        )  # fmt: skip

    @property
    def _of_data(self) -> list[str]:
        """What `train` has to be told of the data, too."""
        given = {
            "--tokenizer": self.tokenizer,
            "--chat-template": self.chat_template,
            "--columns": self.columns,
        }
        return [str(x) for pair in given.items() if pair[1] is not None for x in pair]

    def _own_lengths(self, model: str, data: list[str], longest: int) -> tuple[OwnLengths, int]:
        """How the documents of files are long, and how many tokens they have together."""
        from twinstream.data.options import DataOptions
        from twinstream.data.shapes import columns_of
        from twinstream.training.data_opening import opened, tokenizer_for
        from twinstream.training.planning import expected_packing

        path, sides = Path(model), kind_of_loss(self.loss).sides
        folder = path if path.is_dir() else path.parent if path.name == "config.json" else None
        tokenizer = tokenizer_for(self.tokenizer, folder, data, is_random=False)
        rows = DataOptions(
            workers=0,
            pairs=sides > 1,
            chat_template=self.chat_template,
            columns=columns_of(self.columns) if self.columns else (),
        )
        read = opened(data, tokenizer, rows, longest=longest)
        found = read.lengths()
        seq_len = min(longest, -(-int(found.max()) // _GRAIN) * _GRAIN)
        packing = expected_packing(found, seq_len * sides)
        return OwnLengths(seq_len, packing), read.epoch_tokens


def _numbers(text: str) -> tuple[int, ...]:
    """Numbers of GPUs.

    Raises:
        FitError: one is none.
    """
    found = [int(one) if one.strip().isdecimal() else 0 for one in text.split(",")]
    if not all(1 <= one <= _MOST_GPUS for one in found):
        raise FitError(f"--gpus {text}: numbers of 1 to {_MOST_GPUS}, with commas between them")
    return tuple(dict.fromkeys(found))


@grouped()
def fit(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A preset, a config.json or a folder with one.")
    ],
    how: FitOptions,
    data: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DATA]...", help="Files to train on, of which hours and own lengths are told."
        ),
    ] = None,
    output: Annotated[Path | None, output_option("Write a page here.")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Say what cards can do with a model: all weights or LoRA, a base in few bits, by lengths.

    Each cell is a plan: tokens/s with its error, or what memory it lacks. No weights are read.
    """
    question = how.question(model, data or [])
    found = _found(question, how.effort, how.jobs or os.cpu_count() or 1, quiet=as_json)
    from twinstream.study.fit.screen import fit_html, fit_screen

    if output is not None:
        write_text(fit_html(found), output)
    print_json(found) if as_json else print_report(fit_screen(found))
    if output is not None and not as_json:
        print_report(f"Wrote {output}.")


def _found(question: FitQuestion, effort: str, num_jobs: int, *, quiet: bool) -> "FitTable":
    from twinstream.study.fit.cells import fit as studied
    from twinstream.study.fit.cells import num_plans
    from twinstream.study.fit.screen import fit_screen

    count = num_plans(question, effort)
    with filled_in(f"planning {question.model}", count, quiet=quiet) as show:
        return studied(
            question, effort=effort, num_jobs=num_jobs, on_table=lambda t: show(fit_screen(t))
        )


def lengths_of(text: str) -> tuple[int, ...]:
    """
    >>> lengths_of("2k,8192")
    (2048, 8192)

    Raises:
        FitError: a part is no length.
    """
    found = []
    for part in text.split(","):
        number = parse_number(part)
        if not isinstance(number, int) or not 0 < number <= _LONGEST:
            raise FitError(
                f"--seq-len '{text[:80]}': '{part[:20]}' is no length; write 2k,8k or 2048"
            )
        found.append(number)
    return tuple(dict.fromkeys(found))


def prices_by_machine(given: Sequence[str], machines: tuple[str, ...]) -> dict[str, float]:
    """
    A name is of a machine, or of the GPU that several profiles are of.

    >>> prices_by_machine(["0.4", "h100=2.5"], ("rtx4090", "h100_datasheet"))
    {'rtx4090': 0.4, 'h100_datasheet': 2.5}

    Raises:
        FitError: one is no price, or of a machine that is not asked about.
    """
    found: dict[str, float] = {}
    names = {one: (one, *place_names(load_machine(one))) for one in machines} if given else {}
    known = {name.lower() for own in names.values() for name in own}
    for text in given:
        prices = prices_of(text)
        if prices is None or (isinstance(prices, dict) and not {*map(str.lower, prices)} <= known):
            raise FitError(
                f"--price '{text}' is no price of an hour of {', '.join(machines)}: write 0.4 or "
                f"{machines[0]}=0.4"
            )
        at = {machine: price_at(prices, own) for machine, own in names.items()}
        found |= {machine: price for machine, price in at.items() if price is not None}
    return found
