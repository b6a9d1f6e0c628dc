"""The attributes of a kernel call, read with their types."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args

from twinstream.models.options import Experts
from twinstream.models.recipes.quantized_base import BaseFormat
from twinstream.models.recipes.recipe import OptimizerState
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.ops import Attribute

Attributes = Mapping[str, Attribute]
TEMPORARY_BYTES = "temporary_bytes"  # what a call takes of torch's allocator at most
PLACES_A_ROUND = "places_a_round"  # of a call whose random numbers follow from its round
FROZEN_NORM = "frozen_norm"  # of a head whose matrix alone is trained
IN_PARTS = "in_parts"  # of a kernel of a part of a block
NUM_SLICES = "num_slices"  # of rows, each of which has a gradient of norms by itself
PIECE_GROUPS = "piece_groups"  # in which pieces lie: first those of each rank's first part
QK_NORM_WIDTHS = "qk_norm_widths"  # of norms over all heads of Q, and over all of K
SHARED = "ep"  # of a kernel of a block: how many ranks share its experts
NUM_SEEN = "num_seen"  # keys that a chunk sees of a block of them that goes around a ring
NOT_CAUSAL = "not_causal"  # of a call whose queries see all keys that it has
_EXPERTS = "experts."
_T = TypeVar("_T", int, float, str, bool)


def typed_attribute(attributes: Attributes, name: str, kind: type[_T]) -> _T:
    """Return an attribute of a kernel call, which must be there and be of that very type.

    An int is taken where a float is expected.
    """
    value = required_attributes(attributes, name)[name]
    if kind is float and type(value) is int:
        return kind(value)
    if type(value) is not kind:
        raise TwinstreamError(f"kernel attribute '{name}' is {value!r}, expected {kind.__name__}")
    return value


def most_packed(attributes: Attributes) -> int:
    """Return how many sequences of any lengths a chunk packs at most; 0 where lengths are fixed."""
    if "most_sequences" not in attributes:
        return 0
    return typed_attribute(attributes, "most_sequences", int)


def keys_seen(attributes: Attributes, usual: int) -> int:
    """Return how many keys a chunk sees; the usual where a call does not say so."""
    return typed_attribute(attributes, NUM_SEEN, int) if NUM_SEEN in attributes else usual


def count_of(attributes: Attributes, name: str) -> int:
    """Return how many there are of something; 1 where a call does not say so."""
    return typed_attribute(attributes, name, int) if name in attributes else 1


def is_frozen(attributes: Attributes, name: str = "frozen") -> bool:
    """Whether the weights of a call, or its `frozen_experts`, have no gradient: not unless it says
    so."""
    return name in attributes and typed_attribute(attributes, name, bool)


def expert_attributes(experts: Experts) -> dict[str, Attribute]:
    """What a block kernel is told of experts; `experts_of` reads it back."""
    told = experts.model_dump(exclude={"dense_layers"})
    return {f"{_EXPERTS}{name}": value for name, value in told.items()}


def experts_of(attributes: Attributes) -> Experts | None:
    """Of a block kernel's attributes; None of a block without any."""
    fields = {
        name.removeprefix(_EXPERTS): value
        for name, value in attributes.items()
        if name.startswith(_EXPERTS)
    }
    return Experts.model_validate(fields) if fields else None


def ranks_of_experts(attributes: Attributes) -> int:
    """Over how many ranks the experts of a block lie; 1 where it has them itself, or none."""
    return typed_attribute(attributes, SHARED, int) if SHARED in attributes else 1


def base_format(attributes: Attributes, name: str = "base") -> BaseFormat:
    """Return how a block's matrices, or those of its experts (`experts_base`), lie: in the model's
    dtype unless the call says otherwise."""
    found: BaseFormat = _one_of(attributes, name, get_args(BaseFormat))
    return found


def required_attributes(attributes: Attributes, *names: str) -> dict[str, Attribute]:
    """Return some attributes of a kernel call, all of which must be there."""
    if missing := [name for name in names if name not in attributes]:
        raise TwinstreamError(
            f"kernel attributes {missing} are missing; given: {sorted(attributes)}"
        )
    return {name: attributes[name] for name in names}


def gradient_dtype_name(attributes: Attributes) -> str:
    """Return the dtype of weight gradients: the model's, unless the call says otherwise."""
    return str(attributes.get("gradient_dtype", typed_attribute(attributes, "dtype", str)))


def undecayed_ranges(attributes: Attributes) -> tuple[tuple[int, int], ...]:
    """First and last + 1 of elements that have no weight decay, in order; norms and biases."""
    flat = attributes.get("undecayed", ())
    if not isinstance(flat, tuple) or len(flat) % 2:
        raise TwinstreamError(f"kernel attribute 'undecayed' is {flat!r}, expected pairs")
    return tuple(zip(flat[::2], flat[1::2], strict=True))


def may_skip(attributes: Attributes) -> bool:
    """Whether an optimizer's call may be told that there is nothing to update."""
    return typed_attribute(attributes, "may_skip", bool) if "may_skip" in attributes else False


def optimizer_state(attributes: Attributes) -> OptimizerState:
    """Return what the state of an optimizer's call holds, as in `Recipe`."""
    found: OptimizerState = _one_of(attributes, "optimizer_state", get_args(OptimizerState))
    return found


def _one_of(attributes: Attributes, name: str, known: Sequence[Any]) -> Any:
    """One of some words, the first unless the call says otherwise."""
    value = attributes.get(name, known[0])
    if value not in known:
        raise TwinstreamError(f"kernel attribute '{name}' is {value!r}")
    return value
