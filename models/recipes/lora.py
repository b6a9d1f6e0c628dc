"""LoRA's options: rank, scale, and the projections that get two small matrices beside them."""

from collections.abc import Mapping
from math import sqrt
from typing import Annotated, Literal, get_args

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
)

from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.node import Node
from twinstream.schedule.ops import Attribute

Saved = Literal["embed_tokens", "lm_head"]  # modules that may be trained whole beside adapters
Target = Literal["q", "k", "v", "o", "gate", "up", "down", "experts"]
TARGETS: tuple[Target, ...] = get_args(Target)
LINEAR = TARGETS[:-1]  # those taken unless told: adapters of every expert are many
DEFAULT_RANK = 16
_EXAMPLE = f"r={DEFAULT_RANK},alpha={2 * DEFAULT_RANK},targets={','.join(LINEAR)}"
_ATTRIBUTES = ("lora_rank", "lora_alpha", "lora_targets")
_RSLORA = "lora_rslora"  # told only where it is so
_OPTIONS = ("r", "alpha", "dropout", "rslora", "targets", "save")
_LISTS = ("targets", "save")
_NUMBERS = ("r", "alpha", "dropout")
_YES = {"": True, "true": True, "false": False}


class LoraError(TwinstreamError):
    """Options of LoRA that cannot be read or do not go together."""


class LowRank(Node):
    """Two matrices of a rank, whose product counts alpha / rank times, or rank-stabilised alpha /
    sqrt(rank) times. With `dropout` that share of their inputs is dropped in training, as PEFT's
    `lora_dropout` does.

    Source: Kalajdzievski, A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA,
    arXiv:2312.03732.
    """

    rank: Annotated[int, Field(gt=0, le=2**16)]
    alpha: Annotated[float, Field(gt=0, le=1e6)]
    rslora: bool = False
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @property
    def scale(self) -> float:
        """What the product of the two matrices is multiplied by.

        >>> Lora(rank=16, alpha=8.0).scale, Lora(rank=16, alpha=8.0, rslora=True).scale
        (0.5, 2.0)
        """
        return self.alpha / (sqrt(self.rank) if self.rslora else self.rank)

    @property
    def options(self) -> str:
        """Rank and scale as `--lora` takes them."""
        return f"r={self.rank},alpha={self.alpha:.17g}" + (",rslora" if self.rslora else "")

    @model_serializer(mode="wrap")
    def _without_what_is_unset(self, serialize: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Documents, and what is known by their hash, only tell of what is not usual."""
        document: dict[str, object] = serialize(self)
        for name in ("rslora", "dropout", "saved"):
            if not document.get(name):
                document.pop(name, None)
        return document


class Lora(LowRank):
    """y = x W^T + scale (x A^T) B^T beside every target projection W of every block.

    `gate`, `up` and `down` are of the feed-forward network that all tokens go through; `experts`
    are two beside each routed expert, one of gate and up together, one of down. A is
    [rank, in_features], B is [out_features, rank], and scale is alpha / rank (rank-stabilised,
    alpha / sqrt(rank)). Targets are in the order of `TARGETS`, whatever order they are given in.
    What is `saved` is no part of it: trained and written whole, beside the adapters.

    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, arXiv:2106.09685.
    """

    targets: Annotated[tuple[Target, ...], Field(min_length=1, strict=False)] = LINEAR
    saved: Annotated[tuple[Saved, ...], Field(strict=False)] = ()

    @field_validator("targets")
    @classmethod
    def _in_order(cls, given: tuple[Target, ...]) -> tuple[Target, ...]:
        return tuple(target for target in TARGETS if target in given)

    @field_validator("saved")
    @classmethod
    def _saved_in_order(cls, given: tuple[Saved, ...]) -> tuple[Saved, ...]:
        return tuple(sorted(set(given)))

    @property
    def text(self) -> str:
        """What `lora_of` reads."""
        saved = f",save={','.join(self.saved)}" if self.saved else ""
        return f"{self.options},targets={','.join(self.targets)}{saved}"

    @property
    def saved_groups(self) -> tuple[str, ...]:
        """The groups of parameters that are trained whole."""
        return tuple({"embed_tokens": "embedding", "lm_head": "head"}[name] for name in self.saved)

    @property
    def attributes(self) -> dict[str, Attribute]:
        """What a block kernel is told of it; `lora_of_attributes` reads it back."""
        told = (self.rank, self.alpha, ",".join(self.targets))
        found: dict[str, Attribute] = dict(zip(_ATTRIBUTES, told, strict=True))
        return found | ({_RSLORA: True} if self.rslora else {})


class ModuleLora(LowRank):
    """The same beside linear layers in the blocks of a traced module, by their names there.

    A target is the last part of a name (`q_proj`; `q` is that, too). None given are all of them.
    """

    targets: Annotated[tuple[str, ...], Field(strict=False)] = ()

    @property
    def text(self) -> str:
        """What `module_lora_of` reads."""
        dropout = f",dropout={self.dropout!r}" if self.dropout else ""
        targets = f",targets={','.join(self.targets)}" if self.targets else ""
        return self.options + dropout + targets

    def covers(self, name: str) -> bool:
        """Whether the layer of that name, or of that last part of a name, is a target."""
        last = name.rpartition(".")[2]
        return (
            not self.targets or last in self.targets or last.removesuffix("_proj") in self.targets
        )


def lora_of_attributes(attributes: Mapping[str, Attribute]) -> Lora | None:
    """Of a block kernel's attributes; None where it has no adapters.

    Raises:
        LoraError: the attributes are incomplete or no options of LoRA.
    """
    if not any(name in attributes for name in _ATTRIBUTES):
        return None
    rank, alpha, targets = (attributes.get(name) for name in _ATTRIBUTES)
    fields = {"rank": rank, "alpha": alpha, "rslora": attributes.get(_RSLORA, False)}
    return _made(fields, str(targets).split(","), f"kernel attributes {dict(attributes)}")


def lora_of(text: str) -> Lora:
    """The options in a text such as `r=16,alpha=32,targets=q,k,v,o,gate,up,down`.

    What is left out is r=16, alpha = 2 r, and all targets but `experts`; with `rslora` the scale is
    alpha / sqrt(r), with `save=embed_tokens,lm_head` these are trained whole.

    Raises:
        LoraError: the text cannot be read; says what it should look like.

    >>> lora_of("r=8,targets=q,v")
    Lora(rank=8, alpha=16.0, rslora=False, dropout=0.0, targets=('q', 'v'), saved=())
    """
    fields, targets = _read(text)
    if fields.pop("dropout"):
        raise LoraError(
            f"--lora '{text}': twinstream's kernels have no dropout: with it a model runs by its "
            "own code, of which a config.json or a folder is needed, and no --base; or leave it out"
        )
    return _made(fields, targets or list(LINEAR), f"--lora '{text}'")


def has_dropout(text: str | None) -> bool:
    """Whether a text such as `r=16,dropout=0.05` asks for dropout.

    Raises:
        LoraError: the text cannot be read.
    """
    return text is not None and bool(_read(text)[0]["dropout"])


def module_lora_of(text: str) -> ModuleLora:
    """The same of a traced module, whose layers have names of their own.

    Raises:
        LoraError: the text cannot be read; says what it should look like.

    >>> module_lora_of("r=8,rslora,targets=q_proj,v_proj")
    ModuleLora(rank=8, alpha=16.0, rslora=True, dropout=0.0, targets=('q_proj', 'v_proj'))
    """
    fields, targets = _read(text)
    if fields.pop("saved"):
        raise LoraError(
            f"--lora '{text}': the model runs by its own code, beside which adapters alone are "
            "trained: leave out save="
        )
    try:
        return ModuleLora.model_validate(fields | {"targets": targets})
    except ValidationError as error:
        raise _refused(error, f"--lora '{text}'") from None


def _read(text: str) -> tuple[dict[str, object], list[str]]:
    """Rank, alpha and scale, and the targets in a text; no targets where it has none."""
    found: dict[str, list[str]] = {}
    key = ""
    for part in text.split(","):
        name, is_pair, value = (piece.strip() for piece in part.partition("="))
        is_named = bool(is_pair) or name == "rslora"
        if is_named and name in found:
            raise LoraError(f"--lora '{text}' says '{name}' twice")
        if is_pair:
            key = name
        elif not is_named and key not in _LISTS:
            raise _unreadable(text, f"'{part.strip()}' has no name")
        found.setdefault(name if is_named else key, []).append(value if is_named else name)
    if unknown := [name for name in found if name not in _OPTIONS]:
        raise _unreadable(text, f"'{unknown[0]}' is no option of it")
    numbers = {name: _number(text, found[name][0]) for name in _NUMBERS if name in found}
    said = found.get("rslora", ["false"])[0].lower()
    if said not in _YES:
        raise _unreadable(text, f"rslora is '{said}', neither true nor false")
    rank = numbers.get("r", DEFAULT_RANK)
    whole = int(rank) if rank == int(rank) else rank
    fields: dict[str, object] = {
        "rank": whole, "alpha": numbers.get("alpha", 2.0 * rank), "rslora": _YES[said],
        "dropout": numbers.get("dropout", 0.0),
        "saved": found.get("save", []),
    }  # fmt: skip
    return fields, found.get("targets", [])


def _number(text: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise _unreadable(text, f"'{value}' is no number") from None
    if not abs(number) < float("inf"):
        raise _unreadable(text, f"'{value}' is no number that can be used")
    return number


def _made(fields: Mapping[str, object], targets: list[str], given: str) -> Lora:
    if unknown := [target for target in targets if target not in TARGETS]:
        raise LoraError(f"{given}: there is no target '{unknown[0]}'; known: {', '.join(TARGETS)}")
    try:
        return Lora.model_validate({**fields, "targets": targets})
    except ValidationError as error:
        raise _refused(error, given) from None


def _refused(error: ValidationError, given: str) -> LoraError:
    first = error.errors(include_url=False)[0]
    return LoraError(f"{given}: {first['loc'][0]}: {first['msg']}")


def _unreadable(text: str, problem: str) -> LoraError:
    return LoraError(f"cannot read --lora '{text}': {problem}; write it as {_EXAMPLE}")
