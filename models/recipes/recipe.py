"""The training recipe: what decides the bits of a run, apart from the data."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self, get_args

from pydantic import (
    Field,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from twinstream.models.layout import ADAPTERS, EXPERTS, whole_group
from twinstream.models.loss import LOSSES, CrossEntropy, Loss
from twinstream.models.recipes.lora import Lora
from twinstream.models.recipes.quantized_base import BaseFormat
from twinstream.models.recipes.update_rules import UpdateRule, rule_text
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.node import Node
from twinstream.schedule.numbers import PositiveCount

OptimizerPlace = Literal[
    "device", "device_after_backward", "device_before_next_use", "host", "host_after_backward"
]
GradientDtype = Literal["model", "float32"]
OptimizerState = Literal["model", "float32_master", "8bit"]
KernelSet = Literal["eager", "triton", "megatron"]
BEFORE_NEXT_USE: OptimizerPlace = "device_before_next_use"
_AFTER_THE_NORM: tuple[OptimizerPlace, ...] = ("device_after_backward", BEFORE_NEXT_USE)


NarrowUnit = Literal["products", "gradients", "attention", "head"]
NARROW_UNITS: tuple[NarrowUnit, ...] = get_args(NarrowUnit)
USUALLY_NARROW: tuple[NarrowUnit, ...] = ("products", "gradients")


class KernelChoice(Node):
    """Which implementations compute a step; a part of the recipe, since it decides the bits.

    `vector` names that of everything but matmuls and attention; `attention` is a name of the
    executor's registry of attention implementations. Only with `deterministic=False` may it be
    one that does not give the same bits from run to run.

    The kernel set `megatron` is priced and not run: elementwise operations are fused as
    Megatron-LM fuses them, and layers may be split over tp, cp and ep. Its `attention` may also be
    `flash` (the rate that the machine's profile has) or `unfused` (scores in HBM), and its linear
    layers may multiply in `fp8` or `fp4`. `narrow` says which units do: `products` of linear
    layers and of their inputs' gradients, `gradients` of their weights, `attention`'s core, whose
    rate beside its peak is taken to be that of the model's dtype, and the `head`.
    """

    vector: KernelSet = "eager"
    attention: str = "eager"
    deterministic: bool = True
    matmuls: Literal["model", "fp8", "fp4"] = "model"
    narrow: Annotated[tuple[NarrowUnit, ...], Field(strict=False, min_length=1)] = USUALLY_NARROW

    @model_validator(mode="after")
    def _has_matmuls(self) -> Self:
        if self.matmuls != "model" and self.vector != "megatron":
            raise ValueError(
                f"matmuls in {self.matmuls} are of the kernel set megatron, not of {self.vector}"
            )
        if "gradients" in self.narrow and "products" not in self.narrow:
            raise ValueError("gradients of weights multiply what products have cast: add products")
        return self

    @model_serializer(mode="wrap")
    def _without_the_rule(self, serialize: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Documents, and what is known by their hash, only tell the exception."""
        document: dict[str, object] = serialize(self)
        if self.deterministic:
            document.pop("deterministic", None)
        if self.matmuls == "model":
            document.pop("matmuls", None)
        if self.narrow == USUALLY_NARROW:
            document.pop("narrow", None)
        return document


class Recipe(Node):
    """Constants of the optimizer and the slicing that fixes the order of reductions.

    Learning rate, bias correction, step and seed are data of the run (the small device tensor
    `step_state`), not of the recipe. `stochastic_rounding` applies to bf16 and to 8-bit codes only.
    The head works on at most `max_row_slice` rows of logits at a time.

    `gradients` are added up in the model's dtype, rounded at every contribution, or in float32.
    `optimizer_state`: m and v in the model's dtype; or in float32 beside a float32 master, to which
    a bf16 model's parameters are rounded to nearest; or m and v as 8-bit codes, with a float32
    scale for every 256 elements of each.

    `update` is the rule by which parameters are updated; others than AdamW keep their state in the
    model's dtype. `beta1` is the momentum of SGD and Muon.

    `optimizer` says where updates run and when: on the device or the host CPU, each group as soon
    as its last gradient is there; on the device after the whole backward pass, embedding and head
    first, then the layers from the first on; on the device at the beginning of the next step, each
    group just before its first use there; or on the host CPU after the whole backward pass, the
    gradients of all rounds added up there.

    Of `host_groups` the host CPU makes the updates where `optimizer` is `device`: of some groups on
    the host, of the others on the device. All of them on the host is `optimizer` `host`; documents
    of before may list them all.

    With `clips` all gradients are scaled so that their norm, over all of them, is at most that of
    the step: a number of `step_state`, as the learning rate. All updates follow the norm then.

    `kernels` that are left open (None) are chosen with the machine, when a plan is asked for.

    `base` says how the matrices of frozen blocks are kept: in the model's dtype, or in few bits
    (`quantized_base`), from which each is made anew before it is multiplied with.

    A loss other than next-token cross entropy stands in documents by its name (`models.loss`).

    `frozen` groups of parameters (`embedding`, a layer by its number, `3.experts` of one that has
    some, `head`) are only read: they have no gradient, no optimizer state and no update. With
    `lora` the whole base is frozen but what that saves, and adapters train.
    """

    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0, le=1)
    weight_decay: float = Field(default=1e-4, ge=0, le=1e3)
    stochastic_rounding: bool = True
    max_row_slice: PositiveCount = 1024
    update: UpdateRule = "adamw"
    optimizer: OptimizerPlace = "device"
    host_groups: Annotated[tuple[str, ...], Field(strict=False)] = ()
    gradients: GradientDtype = "model"
    optimizer_state: OptimizerState = "model"
    clips: bool = False
    kernels: KernelChoice | None = None
    lora: Lora | None = None
    frozen: Annotated[tuple[str, ...], Field(strict=False)] = ()
    base: BaseFormat = "model"
    loss: SerializeAsAny[Loss] = CrossEntropy()

    @model_validator(mode="before")
    @classmethod
    def _with_loss(cls, given: object) -> object:
        """Documents say a loss by its name, with its options behind it."""
        if not isinstance(given, Mapping) or not LOSSES.keys() & given.keys():
            return given
        named = {name: given[name] for name in LOSSES if given.get(name) is not None}
        rest = {name: value for name, value in given.items() if name not in LOSSES}
        if "loss" in rest and named:
            raise PydanticCustomError("losses", "it says a loss twice")
        return {**rest, "loss": named} if named else rest

    @field_validator("loss", mode="before")
    @classmethod
    def _loss_of_its_class(cls, given: object) -> object:
        if not isinstance(given, Mapping):
            return given
        found = [LOSSES[name].model_validate(v) for name, v in given.items() if name in LOSSES]
        if len(given) == len(found) == 1:
            return found[0]
        raise PydanticCustomError("loss", "it is one of: {names}", {"names": ", ".join(LOSSES)})

    @field_validator("frozen", "host_groups")
    @classmethod
    def _sorted(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(sorted(set(given)))

    @model_validator(mode="after")
    def _base_is_frozen_once(self) -> Self:
        reads_all = any(group.startswith(ADAPTERS) for group in self.frozen)
        if self.lora is not None and self.frozen and not reads_all:
            raise PydanticCustomError(
                "frozen_twice", "with LoRA the whole base is frozen; leave out what to freeze"
            )
        return self

    @model_validator(mode="after")
    def _few_bits_are_frozen(self) -> Self:
        some = any(self.base_of(group) != "model" for group in self.frozen)
        if self.base != "model" and self.lora is None and not some:
            raise PydanticCustomError(
                "nothing_in_few_bits", "only what is frozen can be kept in {base}: train adapters "
                "(--lora r=16) or freeze layers or experts, or leave out base", {"base": self.base},
            )  # fmt: skip
        return self

    @model_validator(mode="after")
    def _suits_the_update(self) -> Self:
        if self.update != "adamw" and self.optimizer_state != "model":
            raise PydanticCustomError(
                "update", "{rule} keeps its state in the model's dtype: a state of {state} is of "
                "AdamW", {"rule": rule_text(self.update), "state": self.optimizer_state},
            )  # fmt: skip
        if self.update == "muon" and self.uses_host:
            raise PydanticCustomError(
                "update", "Muon's matrix products are the device's: updates on the host CPU are of "
                "AdamW, SGD, Lion and rules of one's own",
            )  # fmt: skip
        return self

    @model_serializer(mode="wrap")
    def _without_what_is_unset(self, serialize: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Documents, and what is known by their hash, only tell of what is not usual."""
        document: dict[str, object] = serialize(self)
        for name in ("lora", "frozen", "host_groups"):
            if not getattr(self, name):
                document.pop(name, None)
        for name, usual in (("update", "adamw"), ("base", "model")):
            if getattr(self, name) == usual:
                document.pop(name, None)
        if (loss := document.pop("loss", None)) is not None and self.loss.name:
            document[self.loss.name] = loss
        return document

    def freezes(self, group: str) -> bool:
        """Whether a group of parameters is only read; adapters are where they are named."""
        if whole_group(group) in self.frozen:
            return True
        if self.lora is not None:
            return (
                not group.startswith(ADAPTERS) and whole_group(group) not in self.lora.saved_groups
            )
        return False

    @property
    def uses_host(self) -> bool:
        """Whether the host CPU makes any updates."""
        return self.optimizer.startswith("host") or bool(self.host_groups)

    def updates_on_host(self, group: str) -> bool:
        """Whether the host CPU makes the update of a group."""
        return self.optimizer.startswith("host") or group in self.host_groups

    def base_of(self, group: str) -> BaseFormat:
        """How the matrices of a group are kept: only of frozen blocks in few bits."""
        is_block = whole_group(group).removesuffix(EXPERTS).isdigit()
        return self.base if is_block and self.freezes(group) else "model"

    @property
    def implementations(self) -> KernelChoice:
        """The kernels; where they are left open, torch's own."""
        return self.kernels or KernelChoice()

    def places_among(self, places: tuple[OptimizerPlace, ...]) -> tuple[OptimizerPlace, ...]:
        """Those of some places of the optimizer that this recipe can have.

        Where it clips, an update needs the norm of all gradients, which the device sums up. The
        host CPU has no Muon, whose matrix products are the device's.
        """
        if self.update == "muon":
            places = tuple(place for place in places if place.startswith("device"))
        return tuple(place for place in places if not self.clips or place in _AFTER_THE_NORM)

    def gradient_dtype(self, dtype: str) -> str:
        """Of a model of `dtype`."""
        return "float32" if self.gradients == "float32" else dtype

    def state_of(self, dtype: str) -> OptimizerState:
        """The optimizer's state of a model of `dtype`: a float32 model is its own master."""
        if self.optimizer_state == "float32_master" and dtype == "float32":
            return "model"
        return self.optimizer_state

    def row_slice(self, num_tokens: int, unit: int = 1) -> int:
        """The largest divisor of `num_tokens` that is at most `max_row_slice`, of whole units; one
        unit at least."""
        count = num_tokens // unit
        limit = min(count, max(1, self.max_row_slice // unit))
        return unit * next(units for units in range(limit, 0, -1) if count % units == 0)


class RecipeError(TwinstreamError):
    """What is asked of a recipe does not go together."""


def recipe_of_fields(fields: Mapping[str, object]) -> Recipe:
    """
    Raises:
        RecipeError: they do not go together.
    """
    try:
        return Recipe.model_validate(fields)
    except ValidationError as error:
        raise RecipeError(error.errors(include_url=False)[0]["msg"]) from None


MATMULS_OF_PRECISION: Mapping[str, Literal["model", "fp8", "fp4"]] = {
    "bf16": "model", "fp16": "model", "fp8": "fp8", "fp4": "fp4",
}  # fmt: skip


def narrow_units(text: str | None) -> tuple[NarrowUnit, ...]:
    """What computes in a precision, of words with commas between them; None is what usually does.

    Raises:
        RecipeError: a word is unknown, or gradients stand without products.
    """
    named = USUALLY_NARROW if text is None else tuple(text.split(","))
    found = tuple(unit for unit in NARROW_UNITS if unit in named)
    for name in named:
        if name not in NARROW_UNITS:
            raise RecipeError(
                f"--precision-units '{name:.40}' is unknown; known: {', '.join(NARROW_UNITS)}"
            )
    if "gradients" in found and "products" not in found:
        raise RecipeError("--precision-units gradients needs products, which cast for both: add it")
    return found


def megatron_recipe(
    attention: str = "flash", precision: str = "bf16",
    gradients: GradientDtype = "float32",
) -> Recipe:  # fmt: skip
    """How Megatron-LM trains by default, as published measurements were made.

    Args:
        attention: an implementation's name, `flash` (what the machine's profile has) or `unfused`.
        precision: bf16, fp16, fp8 or fp4; of the last two only linear layers multiply in it.
        gradients: the dtype they are summed in.
    """
    kernels = KernelChoice(
        vector="megatron", attention=attention, matmuls=MATMULS_OF_PRECISION[precision]
    )
    return Recipe(
        gradients=gradients, optimizer_state="float32_master", clips=True, kernels=kernels
    )
