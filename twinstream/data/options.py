"""Options of training data, as a user sets them."""

from dataclasses import dataclass
from datetime import date
from math import isfinite
from pathlib import Path
from typing import Literal

from twinstream.data.data_error import DataError
from twinstream.data.shapes import Columns, columns_of
from twinstream.schedule.errors import ArgumentError, require_whole

_TEMPLATES_OWN_DATE = date(2024, 7, 26)  # what Llama's templates say where they are told none


@dataclass(frozen=True)
class Source:
    """One file or folder, and how many times an epoch goes through it.

    Weight 1 is all of it once an epoch, so that sources of weight 1 are as if they were one
    folder; 2 is all of it twice; 0.25 is another quarter of it each epoch.
    """

    path: Path
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not isfinite(self.weight) or not 1e-3 <= self.weight <= 1e3:
            raise DataError(
                f"the weight of {self.path} is {self.weight}: give the number of times that an "
                "epoch goes through it, from 0.001 to 1000"
            )


@dataclass(frozen=True)
class DataOptions:
    """The options by which rows become tokens.

    Attributes:
        loss_on: which tokens are learned. `completions`: of a prompt with its completion the
            completion, of a conversation what the assistant says, of other text everything.
        long_documents: a row with more tokens than the longest document of a plan is cut into
            documents of its own, or refused.
        chat_template: a Jinja file in place of the template in the tokenizer's folder.
        today: what templates that print the date are told, so that a run that goes on tomorrow
            sees the tokens of today.
        pairs: each row has a prompt with a chosen and a rejected answer, which are two documents.
        columns: under which names columns are read, as (("prompt", "question"),).
        skip_bad_rows: how many rows that cannot be used are left out; one more is an error.
        workers: processes that tokenise beside the training; 0 does it in the caller's.
    """

    loss_on: Literal["completions", "all"] = "completions"
    long_documents: Literal["cut", "refuse"] = "cut"
    chat_template: Path | None = None
    today: date = _TEMPLATES_OWN_DATE
    pairs: bool = False
    columns: Columns = ()
    skip_bad_rows: int = 0
    workers: int = 4

    def __post_init__(self) -> None:
        require_whole("skip_bad_rows", self.skip_bad_rows, 0, 2**31 - 1)
        require_whole("workers", self.workers, 0, 1024)
        if self.columns:
            columns_of(",".join(f"{ours}={theirs}" for ours, theirs in self.columns))
        _require_one_of("loss_on", self.loss_on, ("completions", "all"))
        _require_one_of("long_documents", self.long_documents, ("cut", "refuse"))


def _require_one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ArgumentError(f"{name} needs to be one of {', '.join(known)}, got {value!r:.60}")
