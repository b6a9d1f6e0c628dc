"""Rows of token ids, as tokenisers of others leave them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinstream.data.data_error import DataError
from twinstream.data.encoding.conversation import kind, short

_IGNORED = -100  # by the losses of transformers


@dataclass(frozen=True)
class TokenRow:
    """One document's ids [N], and which of them are learned [N]."""

    ids: NDArray[np.int32]
    learned: NDArray[np.bool_]


def token_row(fields: Mapping[str, Any], *, everything: bool) -> TokenRow:
    """`input_ids`, of which `labels` of -100 are not learned, without what is padding.

    `labels` lie below the ids that they are of, as transformers takes them. Without them
    `completion_mask` says what is learned, and without that it is all.

    Args:
        everything: learn all.

    Raises:
        DataError: a field is no list of whole numbers of the same length, or labels are others
            than the ids.
    """
    ids = _numbers(fields, "input_ids", None)
    learned = np.ones(len(ids), np.bool_)
    if fields.get("labels") is not None:
        labels = _numbers(fields, "labels", len(ids))
        learned = labels != _IGNORED
        _require_same(ids, labels, learned)
    elif fields.get("completion_mask") is not None:
        learned = _numbers(fields, "completion_mask", len(ids)) != 0
    if fields.get("attention_mask") is not None:
        kept = _numbers(fields, "attention_mask", len(ids)) != 0
        ids, learned = ids[kept], learned[kept]
    if len(ids) and (ids.min() < 0 or ids.max() >= 2**31):
        raise DataError(f"`input_ids` has {ids.min()} to {ids.max()}: ids are from 0 to {2**31}")
    return TokenRow(ids.astype(np.int32), learned | everything)


def _numbers(fields: Mapping[str, Any], name: str, length: int | None) -> NDArray[np.int64]:
    value = fields[name]
    if not isinstance(value, list) or not all(type(one) in (int, bool) for one in value):
        raise DataError(
            f"`{name}` needs to be a list of whole numbers, and is {kind(value)}: {short(value)}"
        )
    if length is not None and len(value) != length:
        raise DataError(f"`{name}` has {len(value)} numbers, and `input_ids` has {length}")
    try:
        return np.array(value, np.int64)
    except OverflowError:
        raise DataError(f"`{name}` has a number that is no id: {short(max(value))}") from None


def _require_same(
    ids: NDArray[np.int64], labels: NDArray[np.int64], learned: NDArray[np.bool_]
) -> None:
    other = np.flatnonzero(learned & (labels != ids))
    if len(other):
        at = int(other[0])
        raise DataError(
            f"number {at + 1} of `labels` is {labels[at]}, and of `input_ids` {ids[at]}: each "
            f"label needs to be the id at its own place, or {_IGNORED} (the model shifts them)"
        )
