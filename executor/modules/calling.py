"""How a module is called: its batch, its arguments, what it draws, and tensors without memory."""

import inspect
import zlib
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from twinstream.executor.kernels.step_state import StepState
from twinstream.executor.modules.batches import Batch
from twinstream.executor.modules.blocks import ModuleRefusal
from twinstream.models.options import PositionLimit

NEVER = 1.0 - 2**-24  # the largest random number: above every probability of being dropped
POSITIONS = "twinstream_positions"  # attribute of a module: the limit that its rotary ones have
_REMADE = ("longrope", "dynamic")
_LONG = "longrope"


def run_module(module: nn.Module, batch: Batch) -> torch.Tensor:
    """Logits of a batch: what the module returns, its `logits`, or the first of a tuple.

    Raises:
        ModuleRefusal: it returns something else.
    """
    is_meta = any(tensor.device.type == "meta" for tensor in batch.values())
    with _autocast_on_meta() if is_meta else nullcontext():
        out = module(**batch)
    found = out if isinstance(out, torch.Tensor) else getattr(out, "logits", None)
    if found is None and isinstance(out, tuple | list) and out:
        found = out[0]
    if not isinstance(found, torch.Tensor):
        raise ModuleRefusal(
            f"{type(module).__name__} returns a {type(out).__name__}: expected logits, an object "
            "that has `logits`, or a tuple that begins with them"
        )
    return found


def flatten_dictionaries(structure: Any) -> None:
    """Dictionaries of a class of their own, as models hand keys and values on in, are flattened
    from now on as plain ones; what else they hold is a part of the structure."""
    for leaf in pytree.tree_leaves(structure):
        kind = type(leaf)
        if not isinstance(leaf, dict | UserDict) or kind in pytree.SUPPORTED_NODES:
            continue
        if any(isinstance(held, torch.Tensor) for held in pytree.tree_leaves(_attributes(leaf))):
            continue
        pytree.register_pytree_node(
            kind, _flat_dictionary, partial(_dictionary, kind),
            flatten_with_keys_fn=_flat_dictionary_with_keys,
            serialized_type_name=f"{kind.__module__}.{kind.__qualname__}.{id(kind)}",
        )  # fmt: skip
        flatten_dictionaries(leaf)


def _items(held: Any) -> dict[Any, Any]:
    """As they lie, whatever the class makes of asking for them."""
    return held.data if isinstance(held, UserDict) else dict(dict.items(held))


def _attributes(held: Any) -> dict[str, Any]:
    return {name: value for name, value in getattr(held, "__dict__", {}).items() if name != "data"}


def _flat_dictionary(held: Any) -> tuple[list[Any], Any]:
    items = _items(held)
    return list(items.values()), (tuple(items), deepcopy(_attributes(held)))


def _flat_dictionary_with_keys(held: Any) -> tuple[list[tuple[Any, Any]], Any]:
    values, context = _flat_dictionary(held)
    keys: list[Any] = [pytree.MappingKey(key) for key in context[0]]
    return list(zip(keys, values, strict=True)), context


def _dictionary(kind: type[Any], values: Iterable[Any], context: Any) -> Any:
    keys, attributes = context
    made: Any = object.__new__(kind) if issubclass(kind, UserDict) else dict.__new__(kind)
    vars(made).update(deepcopy(attributes))
    items = dict(zip(keys, values, strict=True))
    if isinstance(made, UserDict):
        made.data = items
    else:
        dict.update(made, items)
    return made


def module_inputs(module: nn.Module, batch: Batch) -> Batch:
    """What of a batch the module's forward takes, by its names: some have no argument for
    positions, and of some the first one, the tokens, is called otherwise."""
    names = _arguments(type(module).forward)
    given = dict(batch)
    if "position_ids" in batch and "position_ids" not in names:
        del given["position_ids"]
    if "input_ids" in given and "input_ids" not in names and names:
        given = {names[0]: given.pop("input_ids"), **given}
    return given


@cache
def _arguments(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Those that can be given by name; the first is the module itself."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = inspect.signature(forward).parameters.values()
    return tuple(one.name for one in found if one.kind in kinds)[1:]


class NoMemory(FakeTensorMode):
    """Tensors with a device and a shape, without memory."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.rand.default and not list(args[0]):
            with self:  # whether a layer is dropped: none is
                return torch.tensor(NEVER)
        if func is torch.ops.aten._grouped_mm.default:  # torch has a rule for bfloat16 only
            left, right = args[0], args[1]
            offsets = args[2] if len(args) > 2 else kwargs["offs"]
            groups = offsets.shape[:1] if left.dim() == right.dim() == 2 else ()
            with self:
                return torch.empty(*groups, left.shape[0], right.shape[-1], dtype=left.dtype)
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def _autocast_on_meta() -> Iterator[None]:
    """`torch.autocast` does nothing for tensors without storage, for which torch has none;
    transformers 4 turns it off so, wherever positions are made."""
    own: Any = torch.autocast

    def chosen(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return nullcontext() if device_type == "meta" else own(device_type, *args, **kwargs)

    with patch.object(torch, "autocast", chosen):
        yield


@contextmanager
def evaluating(module: nn.Module, evaluates: bool) -> Iterator[None]:
    """A part of the module is as `eval()` makes it: nothing is dropped, and batch norm takes its
    statistics."""
    if not evaluates:
        yield
        return
    module.eval()
    try:
        yield
    finally:
        module.train()


@contextmanager
def drawing(random: Callable[[], None] | None) -> Iterator[None]:
    """What is drawn inside follows from the seed; nobody else's numbers change."""
    if random is None:
        yield
        return
    with torch.random.fork_rng():
        random()
        yield


def seed_for(state: StepState, place: int) -> None:
    step, seed = state.integers.tolist()
    torch.manual_seed(zlib.crc32(f"{seed} {step} {place}".encode()))


def hold_frequencies(module: nn.Module, *, by_document: bool = False) -> PositionLimit | None:
    """Rotary frequencies that are remade for long sequences stay those of short ones.

    transformers takes the longest position of a batch: `longrope` has other frequencies above the
    length that a model was first trained with, `dynamic` makes them anew above its longest, and
    keeps them. Where several documents share a batch that says nothing of one of them.

    Args:
        by_document: of `longrope` each document has those that it has alone, by its length.

    Returns:
        The longest sequence for which they are transformers'; None where they always are.
    """
    limits = []
    for name, part in module.named_modules():
        kinds = getattr(part, "rope_type", None)
        of_layers = kinds if isinstance(kinds, dict) else {None: kinds}
        remade = {layer: kind for layer, kind in of_layers.items() if kind in _REMADE}
        chosen = {layer: _unchanged(part, layer, kind) for layer, kind in remade.items()}
        for layer, kind in remade.items():
            if by_document and kind == _LONG:
                continue
            why = f"the frequencies of its {kind} rotary embedding '{name}' change above that"
            limits.append(PositionLimit(tokens=chosen[layer], why=why))
        if by_document:
            _choose_by_document(part, {k: n for k, n in chosen.items() if remade[k] == _LONG})
        if remade:
            held = of_layers | dict.fromkeys(remade, "default")
            part.rope_type = held if isinstance(kinds, dict) else "default"
    return min(limits, key=lambda one: one.tokens, default=None)


def grows_with_documents(module: nn.Module) -> bool:
    """Whether a module of transformers has frequencies that can be chosen by document."""
    config: Any = getattr(module, "config", None)
    return config is not None and f"'{_LONG}'" in str(config.to_dict())


def _unchanged(part: Any, layer: str | None, kind: str) -> int:
    """Tokens of the longest sequence whose frequencies are those that the part begins with."""
    if kind == "dynamic":
        return int(getattr(part, f"{layer}_max_seq_len_cached", part.max_seq_len_cached))
    config, name = part.config, "original_max_position_embeddings"
    told = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    told = told if layer is None else told.get(layer, told)
    found = told.get(name) or getattr(config, name, None) or config.max_position_embeddings
    return int(found)


def _choose_by_document(part: Any, limits: Mapping[str | None, int]) -> None:
    """Have a rotary embedding compute with both frequencies, and take for each token those of its
    document.

    Args:
        limits: by kind of layer, tokens of the longest document with the first ones.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    make: Any = ROPE_INIT_FUNCTIONS[_LONG]
    for layer, limit in limits.items():
        more = {} if layer is None else {"layer_type": layer}
        frequencies, _ = make(part.config, torch.device("cpu"), seq_len=limit + 1, **more)
        part.register_buffer(_of_long(layer), frequencies, persistent=False)
    own: Callable[..., Any] = part.forward

    def forward(
        x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None, **more: Any
    ) -> Any:
        told = more if layer_type is None else more | {"layer_type": layer_type}
        short = own(x, position_ids, **told)
        if layer_type not in limits:
            return short
        name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
        buffers = part._buffers
        kept = buffers[name]
        buffers[name] = buffers[_of_long(layer_type)]
        try:
            long = own(x, position_ids, **told)
        finally:
            buffers[name] = kept
        is_long = document_lengths(position_ids) > limits[layer_type]

        def chosen(of_short: torch.Tensor, of_long: torch.Tensor) -> torch.Tensor:
            where = is_long.view(*is_long.shape, *(1 for _ in of_short.shape[is_long.dim() :]))
            return torch.where(where, of_long, of_short)

        return pytree.tree_map(chosen, short, long)

    if limits:
        part.forward = forward


def _of_long(layer: str | None) -> str:
    return "long_inv_freq" if layer is None else f"{layer}_long_inv_freq"


def document_lengths(positions: torch.Tensor) -> torch.Tensor:
    """Of each token of rows [B, T] the length of its document, whose positions begin at 0.

    >>> document_lengths(torch.tensor([[0, 1, 2, 0, 1]])).tolist()
    [[3, 3, 3, 2, 2]]
    """
    if positions.dim() != 2:
        raise ModuleRefusal(
            f"positions of {positions.dim()} axes say of no token how long its document is"
        )
    number = ((positions == 0).cumsum(1) - 1).clamp(min=0)
    lengths = torch.zeros_like(positions).scatter_reduce(1, number, positions + 1, "amax")
    return lengths.gather(1, number)
