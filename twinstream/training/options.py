"""All that a training run may be told: the same names in TOML, on the command line, in Python."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from twinstream.data.data_error import DataError
from twinstream.data.shapes import columns_of
from twinstream.log.run_files import OPTIONS
from twinstream.models.loss import kind_of_loss
from twinstream.options.option_group import (
    DATA,
    MEMORY,
    OPTIMIZER,
    RUN,
    SEVERAL,
    STEPS,
    TRAINED,
    WHERE,
    flag,
)
from twinstream.options.recipe_options import RecipeOptions
from twinstream.options.step_options import RankOptions, StepOptions
from twinstream.schedule.errors import ArgumentError, did_you_mean
from twinstream.schedule.files import parse_toml, read_text, real_path, reason_of, write_text
from twinstream.training.rates import Cooldown, Decay

_SHOWN = 3
BYTES = "bytes"  # the tokenizer that takes each byte for a token


# What decides the bits of a run, beside the data, whose fingerprint is compared.
FIXED = (
    *("lora", "loss", "aux_loss", "freeze", "base", "dtype"),
    *("seq_len", "tokens_per_step", "chunk_tokens", "chunks_per_round", "seed"),
    *("optim", "weight_decay", "beta1", "beta2", "eps", "optimizer_state", "gradients"),
    "kernels",
    *("attention", "max_grad_norm"),
)
# Of ranks: none of it decides the data.
LAYOUT = (
    *("pp", "dp", "zero", "tp", "cp", "cp_exchange", "ep", "pipeline", "virtual_stages"),
    "sequence_parallel",
)
ALIASES = {"lr": "learning_rate"}


class OptionsError(ArgumentError):
    """An option is unknown or cannot be what was given; says which, and where it stands."""


class TrainOptions(RecipeOptions, StepOptions, RankOptions):
    """Options of a run; None is chosen when it starts, and `resolved` options say what.

    The description of each field is the help of its flag: `learning_rate` is `--learning-rate`.
    """

    @property
    def on_ranks(self) -> bool:
        """Whether ranks train, in processes of their own; be it one."""
        in_parts = self.parts is not None or self.cp_parts is not None
        return (self.ranks or 1) > 1 or in_parts

    @property
    def splits_sequences(self) -> bool:
        """Whether each sequence is computed in parts, be it on one rank."""
        return (self.cp or 1) > 1 or self.cp_parts is not None

    model: str = Field(title="A Hugging Face folder, a config.json or a preset.")
    data: tuple[str, ...] = Field(title="Files and folders, PATH or PATH=WEIGHT.")
    output: Path = Field(title="The folder of the run.")

    adapter: Path | None = flag(TRAINED, "DIR", "A PEFT adapter to go on from, with its LoRA.")

    tokenizer: Path | None = flag(
        DATA, "PATH", "Folder, tokenizer.json or `bytes`; by default the model's, and bytes for "
        "random weights without one.",
    )  # fmt: skip
    seq_len: int = flag(
        DATA, "N", "Tokens of the longest document; documents are packed.", 2048, ge=1, le=2**30
    )
    columns: str | None = flag(
        DATA, "NAME=COLUMN,...", "Columns of other names: prompt=question,completion=answer."
    )
    loss_on: Literal["completions", "all"] = flag(
        DATA, "WHAT", "What is learned of prompts and conversations: completions or all.",
        "completions",
    )  # fmt: skip
    long_documents: Literal["cut", "refuse"] = flag(
        DATA, "WHAT", "Documents longer than --seq-len: cut or refuse.", "cut", rare=True
    )
    skip_bad_rows: int = flag(
        DATA, "N", "Rows that cannot be used are left out, up to so many; they are counted.", 0,
        ge=0, le=2**31 - 1, rare=True,
    )  # fmt: skip
    chat_template: Path | None = flag(
        DATA, "FILE", "Jinja file in place of the tokenizer's own template."
    )
    data_workers: int = flag(
        DATA,
        "N",
        "Processes that tokenise beside training; 0 is none.",
        2,
        ge=0,
        le=1024,
        rare=True,
    )
    eval_data: tuple[str, ...] = flag(DATA, "PATH", "Files to evaluate on; may repeat.", ())
    eval_every: int | None = flag(
        DATA, "STEPS", "Evaluate after so many steps; by default with each checkpoint.", ge=1
    )
    eval_tokens: int = flag(DATA, "N", "Most tokens of an evaluation.", 1_000_000, ge=1, rare=True)

    steps: int | None = flag(STEPS, "N", "Optimizer steps.", ge=1, le=2**31 - 1)
    epochs: float | None = flag(
        STEPS, "X", "Times through the data, about; 1 without --steps.", gt=0, le=1e6
    )
    batch_size: int | None = flag(
        STEPS,
        "N",
        "Sequences of a step, with dpo pairs: --tokens-per-step in units of --seq-len.",
        ge=1,
    )
    learning_rate: float | None = flag(
        STEPS, "X", "Learning rate at its peak; by default 2e-5 for given weights, 2e-4 with LoRA "
        "(with dpo 1e-6 and 1e-5), 3e-4 for random weights.", ge=0, le=1e3,
    )  # fmt: skip
    decay: Decay = flag(
        STEPS, "SHAPE", "How the rate falls: constant, linear, cosine or wsd.", "cosine"
    )
    warmup: str = flag(STEPS, "N|SHARE", "Steps of warm-up, or a share of all.", "3%")
    floor: float = flag(
        STEPS, "X", "Share of the rate that it falls to.", 0.1, ge=0, le=1, rare=True
    )
    cooldown: str = flag(
        STEPS, "N|SHARE", "Steps, or share of all, of wsd's decay.", "20%", rare=True
    )
    cooldown_shape: Cooldown = flag(
        STEPS, "SHAPE", "Shape of wsd's decay: linear or 1-sqrt.", "1-sqrt", rare=True
    )
    seed: int = flag(
        STEPS, "N", "Seed of weights, order of data and rounding.", 0, ge=0, le=2**31 - 1
    )

    weight_decay: float = flag(
        OPTIMIZER,
        "X",
        "Decay of matrices and embeddings; norms and biases have none.",
        0.01,
        ge=0,
        le=1e3,
    )
    beta1: float | None = flag(
        OPTIMIZER,
        "X",
        "Decay of the first moment, or momentum; by default 0.9, with muon 0.95.",
        ge=0,
        lt=1,
        rare=True,
    )
    beta2: float | None = flag(
        OPTIMIZER, "X",
        "Decay of the second moment; by default 0.999, with lion 0.99, with muon 0.95.",
        ge=0, lt=1, rare=True,
    )  # fmt: skip
    eps: float = flag(OPTIMIZER, "X", "Number added to the root.", 1e-8, gt=0, le=1, rare=True)
    max_grad_norm: float = flag(
        OPTIMIZER, "X", "Gradients are clipped to this norm of all; 0 is not at all.", 1.0, ge=0
    )

    disk: Path | None = flag(
        MEMORY, "PATH", "A folder on a drive for what has no room in host memory: frozen weights "
        "are read from the model's own files there, or from copies made there once; what is "
        "trained is written there, to a file that is gone when the run is.",
    )  # fmt: skip

    machine: str | None = flag(
        WHERE, "NAME|FILE", "Profile of this machine; by default found or measured."
    )
    backend: Literal["auto", "cpu", "cuda"] = flag(
        WHERE, "NAME", "auto, cpu or cuda.", "auto", rare=True
    )

    ranks: int | None = flag(
        SEVERAL, "N", "GPUs or processes of this machine to train on; by default all its GPUs, or "
        "one process; those of all machines together where torchrun starts them.", ge=1, le=64,
    )  # fmt: skip
    hosts: int = flag(
        SEVERAL, "N", "Machines that the ranks are on, which torchrun says; here for --dry-run.", 1,
        rare=True, ge=1, le=64,
    )  # fmt: skip

    save_every: str = flag(
        RUN, "N|TIME", "A checkpoint every so many steps (500) or minutes (30min), or never.",
        "30min",
    )  # fmt: skip
    keep: int = flag(RUN, "N", "Checkpoints to keep, the last ones and the best.", 2, ge=1)
    tensorboard: bool = flag(RUN, "", "Log for TensorBoard, too.", False, rare=True)

    @model_validator(mode="after")
    def _hosts_have_as_many_ranks(self) -> Self:
        if (self.ranks or 1) % self.hosts:
            raise PydanticCustomError(
                "ranks_of_hosts",
                "{ranks} ranks are not as many on each of {hosts} machines",
                {"ranks": self.ranks or 1, "hosts": self.hosts},
            )
        return self

    @property
    def ranks_on_host(self) -> int:
        """Ranks of one machine."""
        return (self.ranks or 1) // self.hosts

    @field_validator("columns", mode="before")
    @classmethod
    def _columns_as_text(cls, value: Any) -> Any:
        """A table of TOML, or a dictionary, as on the command line; names are known ones."""
        if isinstance(value, Mapping):
            value = ",".join(f"{ours}={theirs}" for ours, theirs in value.items())
        if isinstance(value, str):
            try:
                columns_of(value)
            except DataError as error:
                raise PydanticCustomError("columns", "{why}", {"why": str(error)}) from None
        return value

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str = "") -> "TrainOptions":
        """Checked, a batch size in tokens.

        Args:
            where: what the message begins with: a file, say.

        Raises:
            OptionsError: one is unknown, missing, wrong, or said twice.
        """
        values = {ALIASES.get(name, name): value for name, value in given.items()}
        if len(values) < len(given):
            twice = next(f"{one} and {other}" for one, other in ALIASES.items() if one in given)
            raise OptionsError(f"{where}{twice} are the same: give one")
        try:
            return cls.model_validate(values)._in_tokens(where)
        except ValidationError as error:
            found = error.errors(include_url=False)
            shown = "; ".join(_told(one) for one in found[:_SHOWN])
            more = f" (and {len(found) - _SHOWN} more)" if len(found) > _SHOWN else ""
            raise OptionsError(f"{where}{shown}{more}") from None

    def _in_tokens(self, where: str) -> "TrainOptions":
        """A batch size as tokens per step."""
        if self.batch_size is None:
            return self
        tokens = self.batch_size * self.seq_len * kind_of_loss(self.loss).sides
        if self.tokens_per_step not in (None, tokens):
            raise OptionsError(
                f"{where}batch_size {self.batch_size} is {tokens:,} tokens a step, and "
                f"tokens_per_step is {self.tokens_per_step:,}: give one"
            )
        return self.model_copy(update={"tokens_per_step": tokens, "batch_size": None})

    def with_seq_len(self, seq_len: int) -> "TrainOptions":
        """Return them with sequences of another length; where a batch size is given, as many."""
        changes = {"seq_len": seq_len}
        if self.tokens_per_step is not None and "batch_size" in self.model_fields_set:
            changes["tokens_per_step"] = self.tokens_per_step // self.seq_len * seq_len
        return self.model_copy(update=changes)


_NO_LONGER = (("fp32_tail", 0),)  # as run.toml of older runs has what was not asked for


def read_options(path: Path) -> dict[str, Any]:
    """What a TOML file says, as yet unchecked; its relative paths are as they are.

    Raises:
        OptionsError: it cannot be read, or is no TOML.
    """
    try:
        values = parse_toml(read_text(path))
        return {name: v for name, v in values.items() if (name, v) not in _NO_LONGER}
    except OSError as error:
        raise OptionsError(f"cannot read {path}: {reason_of(error)}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionsError(f"{path} is not valid TOML: {error}") from None


def require_same(wanted: TrainOptions, before: TrainOptions) -> None:
    """
    Args:
        before: of the run that is to go on, as they were resolved.

    Raises:
        OptionsError: one that decides the bits of the run is another now.
    """
    pairs = {name: (getattr(wanted, name), getattr(before, name)) for name in FIXED}
    pairs["model"] = real_path(wanted.model), real_path(before.model)
    for name, (now, then) in pairs.items():
        if now != then and now is not None:
            raise OptionsError(
                f"{name} is {_shown(now)}, and the run that is to go on began with "
                f"{_shown(then)}: it "
                "decides the bits of the run and cannot change; leave it out, or start a new run"
            )


def _shown(value: object) -> str:
    return f"{str(value) if isinstance(value, Path) else value!r:.60}"


def fixed_options(options: TrainOptions) -> dict[str, Any]:
    """What is given of what decides the bits of the run, as JSON has it."""
    return options.model_dump(mode="json", include=set(FIXED), exclude_none=True)


def write_options(options: TrainOptions, folder: Path) -> None:
    """Write all options as they were resolved, for `twinstream train FOLDER/run.toml`.

    Raises:
        DocumentError: it cannot be written.
    """
    values = options.model_dump(mode="json", exclude_none=True)
    lines = [f"{name} = {_toml(value)}" for name, value in values.items()]
    write_text("\n".join(lines) + "\n", folder / OPTIONS)


def _toml(value: Any) -> str:
    """JSON is TOML for texts, numbers, truth values and lists of them."""
    return json.dumps(value, ensure_ascii=False)


def _told(error: Any) -> str:
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        hint = did_you_mean(name, TrainOptions.model_fields)
        return f"there is no option {name}" + (f": {hint}" if hint else "")
    if error["type"] == "missing":
        return f"{name} is missing"
    if not name:  # of several options together
        return f"{error['msg']}"
    shown = f"{error.get('input')!r:.60}"
    return f"{name} is {shown}: {error['msg'][:1].lower()}{error['msg'][1:]}"
