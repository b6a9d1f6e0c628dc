"""All that a training run may be told: the same names in TOML, on the command line, in Python."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from twinstream.data.data_error import DataError
from twinstream.data.shapes import columns_of
from twinstream.log.run_files import OPTIONS
from twinstream.models.adapters.quantized_base import BaseFormat
from twinstream.models.recipe import is_dpo
from twinstream.models.update_rules import RULES
from twinstream.schedule.errors import ArgumentError, did_you_mean
from twinstream.schedule.files import parse_toml, read_text, real_path, reason_of, write_text
from twinstream.schedule.node import Node
from twinstream.schedule.ops import Reduction
from twinstream.schedule.sizes import parse_number
from twinstream.training.rates import Cooldown, Decay

_SHOWN = 3
BYTES = "bytes"  # the tokenizer that takes each byte for a token
WHAT, DATA, STEPS, ADAMW, PLAN, RANKS, KEEP = (
    "What is trained",
    "Data",
    "Steps",
    "AdamW",
    "Memory and plan",
    "Several ranks",
    "Run",
)


# What decides the bits of a run, beside the data, whose fingerprint is compared.
FIXED = (
    *("lora", "loss", "aux_loss", "freeze", "base", "dtype"),
    *("seq_len", "tokens_per_step", "chunk_tokens", "chunks_per_round", "seed"),
    *("optim", "weight_decay", "beta1", "beta2", "eps", "optimizer_state", "gradients"),
    "kernels",
    *("attention", "max_grad_norm"),
)


LAYOUT = ("pp", "dp", "zero", "pipeline", "virtual_stages")  # of ranks: none of it decides the data


ALIASES = {"lr": "learning_rate"}


class OptionsError(ArgumentError):
    """An option is unknown or cannot be what was given; says which, and where it stands."""


def _option(panel: str, metavar: str, what: str, default: Any = None, **limits: Any) -> Any:
    extra: JsonDict = {"panel": panel, "metavar": metavar}
    return Field(default, description=what, json_schema_extra=extra, **limits)


class TrainOptions(Node):
    """Options of a run; None is chosen when it starts, and `resolved` options say what.

    The description of each field is the help of its flag: `learning_rate` is `--learning-rate`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    model: str = Field(description="A Hugging Face folder, a config.json or a preset.")
    data: tuple[str, ...] = Field(description="Files and folders, PATH or PATH=WEIGHT.")
    output: Path = Field(description="The folder of the run.")

    lora: str | None = _option(
        WHAT,
        "r=16,...",
        "Train adapters beside a frozen base: r=16, and behind commas alpha=32, targets=q,k,v,o "
        "or more; rslora scales by sqrt(r), save=NAME,NAME trains these whole.",
    )
    loss: str | None = _option(
        WHAT, "dpo|FILE.py:FUNCTION", "dpo, with beta=0.1 and label_smoothing=0 behind commas, "
        "prefers the chosen to the rejected answer of each row. Or a loss of your own: of "
        "logits [R, V] and labels [R] one of each row; the model runs by its own code then.",
    )  # fmt: skip
    aux_loss: float | None = _option(
        WHAT, "X", "What the load-balancing loss of experts counts; by default what the model's "
        "config.json says, which is mostly nothing.", ge=0, le=1e3,
    )  # fmt: skip
    trust_remote_code: bool = _option(
        WHAT, "", "Run the Python files in the model's folder; read them first.", False
    )
    adapter: Path | None = _option(WHAT, "DIR", "A PEFT adapter to go on from, with its LoRA.")
    freeze: tuple[str, ...] = _option(
        WHAT, "PATTERN", "Weights, by name, that are not trained; whole layers. May repeat.", ()
    )

    base: BaseFormat = _option(
        WHAT, "8bit|nf4", "Keep the matrices of frozen blocks in few bits.", "model"
    )

    tokenizer: Path | None = _option(
        DATA, "PATH", "Folder, tokenizer.json or `bytes`; by default the model's, and bytes for "
        "random weights without one.",
    )  # fmt: skip
    seq_len: int = _option(
        DATA, "N", "Tokens of the longest document; documents are packed.", 2048, ge=2, le=2**30
    )
    columns: str | None = _option(
        DATA, "NAME=COLUMN,...", "Columns of other names: prompt=question,completion=answer."
    )
    loss_on: Literal["completions", "all"] = _option(
        DATA, "WHAT", "What is learned of prompts and conversations: completions or all.",
        "completions",
    )  # fmt: skip
    long_documents: Literal["cut", "refuse"] = _option(
        DATA, "WHAT", "Documents longer than --seq-len: cut or refuse.", "cut"
    )
    skip_bad_rows: int = _option(
        DATA, "N", "Rows that cannot be used are left out, up to so many; they are counted.", 0,
        ge=0, le=2**31 - 1,
    )  # fmt: skip
    chat_template: Path | None = _option(DATA, "FILE", "Jinja, in place of the tokenizer's own.")
    data_workers: int = _option(
        DATA, "N", "Processes that tokenise beside training; 0 is none.", 2, ge=0, le=1024
    )
    eval_data: tuple[str, ...] = _option(DATA, "PATH", "Files to evaluate on; may repeat.", ())
    eval_every: int | None = _option(
        DATA, "STEPS", "Evaluate after so many steps; by default with each checkpoint.", ge=1
    )
    eval_tokens: int = _option(DATA, "N", "Tokens of an evaluation, at most.", 1_000_000, ge=1)

    steps: int | None = _option(STEPS, "N", "Optimizer steps.", ge=1, le=2**31 - 1)
    epochs: float | None = _option(
        STEPS, "X", "Times through the data, about; 1 without --steps.", gt=0, le=1e6
    )
    tokens_per_step: int | None = _option(
        STEPS,
        "N",
        "Tokens of a step; by default as few as leave the optimizer 1 % of it, and 20 steps.",
        ge=1,
    )
    batch_size: int | None = _option(
        STEPS,
        "N",
        "Sequences of a step, with dpo pairs: --tokens-per-step in units of --seq-len.",
        ge=1,
    )
    learning_rate: float | None = _option(
        STEPS, "X", "At its peak; 2e-5 for given weights, 2e-4 for LoRA (with dpo 1e-6 and 1e-5), "
        "3e-4 for random ones.", ge=0, le=1e3,
    )  # fmt: skip
    decay: Decay = _option(STEPS, "SHAPE", "constant, linear, cosine or wsd.", "cosine")
    warmup: str = _option(STEPS, "N|SHARE", "Steps of warm-up, or a share of all.", "3%")
    floor: float = _option(STEPS, "X", "Share of the rate to fall to.", 0.1, ge=0, le=1)
    cooldown: str = _option(STEPS, "N|SHARE", "Steps of the decay of wsd.", "20%")
    cooldown_shape: Cooldown = _option(STEPS, "SHAPE", "Decay of wsd: linear or 1-sqrt.", "1-sqrt")
    seed: int = _option(STEPS, "N", "Seed of weights, order and rounding.", 0, ge=0, le=2**31 - 1)

    weight_decay: float = _option(
        ADAMW,
        "X",
        "Decay of matrices and embeddings; norms and biases have none.",
        0.01,
        ge=0,
        le=1e3,
    )
    optim: str = _option(
        ADAMW,
        "NAME",
        f"{', '.join(RULES)}, or FILE.py:FUNCTION of your own, with states=N behind a comma.",
        "adamw",
    )
    beta1: float | None = _option(
        ADAMW, "X", "Decay of the first moment, the momentum; 0.9, of Muon 0.95.", ge=0, lt=1
    )
    beta2: float | None = _option(
        ADAMW, "X", "Decay of the second moment; 0.999, of Lion 0.99, of Muon (outside "
        "matrices) 0.95.", ge=0,
        lt=1,
    )  # fmt: skip
    eps: float = _option(
        ADAMW, "X", "What is added to the root of the second moment.", 1e-8, gt=0, le=1
    )
    max_grad_norm: float = _option(
        ADAMW, "X", "Gradients are clipped to this norm of all; 0 is not at all.", 1.0, ge=0
    )
    optimizer_state: Literal["model", "float32_master", "8bit"] = _option(
        ADAMW, "NAME", "m and v in the model's dtype (model), float32_master, or 8bit.", "model"
    )
    gradients: Literal["model", "float32"] = _option(
        ADAMW, "DTYPE", "What gradients are added up in: model or float32.", "model"
    )
    fp32_tail: int = _option(
        ADAMW, "STEPS", "The last steps with a float32 master, planned anew.", 0, ge=0
    )

    dtype: Literal["bfloat16", "float32"] | None = _option(
        PLAN, "NAME", "Dtype of weights and activations; by default the model's."
    )
    device_mem: str | None = _option(
        PLAN, "SIZE", "Cap of device memory, of each rank; by default all free."
    )
    host_mem: str | None = _option(
        PLAN, "SIZE", "Cap of pinned host memory, of each rank; by default 80% free."
    )
    machine: str | None = _option(
        PLAN, "NAME|FILE", "Profile of this machine; by default found or measured."
    )
    backend: Literal["auto", "cpu", "cuda"] = _option(PLAN, "NAME", "auto, cpu or cuda.", "auto")
    policy: str = _option(PLAN, "NAME", "The policy of `twinstream plan`.", "optimal")
    recompute: str | None = _option(
        PLAN, "LEVEL", "Recomputation of every block; by default the planner's."
    )
    chunk_tokens: int | None = _option(PLAN, "N", "Tokens of a chunk.", ge=1)
    chunks_per_round: int | None = _option(
        PLAN, "N", "Chunks of a round; with ranks a round is a microbatch.", ge=1
    )
    kernels: str | None = _option(PLAN, "NAME", "auto, eager or triton.")
    attention: str | None = _option(PLAN, "NAME", "An attention implementation.")
    nondeterministic: bool = _option(
        PLAN, "", "Allow an attention that does not give the same bits from run to run.", False
    )

    ranks: int | None = _option(
        RANKS, "N", "Train on so many GPUs or processes of this machine; by default on all GPUs "
        "that it has, or one process.", ge=1, le=64,
    )  # fmt: skip
    pp: int | None = _option(
        RANKS, "N", "Stages of the pipeline; by default what is predicted to be fastest.", ge=1
    )
    dp: int | None = _option(
        RANKS, "N", "Replicas of the pipeline; by default what is predicted to be fastest.", ge=1
    )
    zero: Literal[0, 1, 2, 3] | None = _option(
        RANKS, "STAGE", "What replicas shard, by ZeRO (0 to 3); by default what is needed to fit."
    )
    reduction: Reduction = _option(
        RANKS, "NAME", "How gradients of replicas are summed: rank_order or library.", "rank_order"
    )
    pipeline: Literal["gpipe", "1f1b", "interleaved", "ring"] | None = _option(
        RANKS, "NAME", "gpipe, 1f1b, interleaved or ring; by default 1f1b."
    )
    virtual_stages: int | None = _option(
        RANKS, "N", "Stages of each rank, with interleaved or ring; by default 1.", ge=1
    )

    save_every: str = _option(
        KEEP, "N|TIME", "A checkpoint every so many steps (500) or minutes (30min), or never.",
        "30min",
    )  # fmt: skip
    keep: int = _option(KEEP, "N", "Checkpoints to keep, the last ones and the best.", 2, ge=1)
    tensorboard: bool = _option(KEEP, "", "Log for TensorBoard, too.", False)

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_as_written(cls, value: Any, info: ValidationInfo) -> Any:
        """`2k` of a number, as flags are read."""
        kind = cls.model_fields[str(info.field_name)].annotation
        kinds = {kind, *get_args(kind)}
        if not isinstance(value, str) or not kinds & {int, float} or kinds & {str, Path}:
            return value
        number = parse_number(value)
        return value if number is None else number

    @field_validator("*")
    @classmethod
    def _no_null_byte(cls, value: Any) -> Any:
        if "\0" in "".join(map(str, value if isinstance(value, tuple) else [value])):
            raise PydanticCustomError("null_byte", "no name has a null byte")
        return value

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
        tokens = self.batch_size * self.seq_len * (2 if is_dpo(self.loss) else 1)
        if self.tokens_per_step not in (None, tokens):
            raise OptionsError(
                f"{where}batch_size {self.batch_size} is {tokens:,} tokens a step, and "
                f"tokens_per_step is {self.tokens_per_step:,}: give one"
            )
        return self.model_copy(update={"tokens_per_step": tokens, "batch_size": None})


def read_options(path: Path) -> dict[str, Any]:
    """What a TOML file says, as yet unchecked; its relative paths are as they are.

    Raises:
        OptionsError: it cannot be read, or is no TOML.
    """
    try:
        return parse_toml(read_text(path))
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
    shown = f"{error.get('input')!r:.60}"
    return f"{name} is {shown}: {error['msg'][:1].lower()}{error['msg'][1:]}"
