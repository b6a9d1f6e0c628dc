"""Where a rank's shard of a whole tensor lies, filled into the calls of its class.

A class of ranks has one schedule. Of a call that works on a shard it says over which axes of the
mesh the whole is cut (`shard_axes`), and what it would be told for the first shard: the elements of
a shard (`num_elements`), where the shard begins (`element_offset`), and of the whole the ranges
that are not decayed (`undecayed`).
"""

from collections.abc import Mapping

from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.ops import Attribute, KernelCall

SHARD_AXES = "shard_axes"


def shard_call(call: KernelCall, index: int) -> KernelCall:
    """What the rank of shard `index` is told.

    >>> told = {"shard_axes": "dp", "num_elements": 8, "element_offset": 0, "undecayed": (6, 10)}
    >>> call = KernelCall(kernel="adamw_step/eager", attributes=told, cost=())
    >>> shard_call(call, 1).attributes
    {'num_elements': 8, 'element_offset': 8, 'undecayed': (0, 2)}
    """
    told = {name: value for name, value in call.attributes.items() if name != SHARD_AXES}
    size, first = _whole(told, "num_elements"), _whole(told, "element_offset")
    start = first + index * size
    told["element_offset"] = start
    ranges = told.pop("undecayed", ())
    assert isinstance(ranges, tuple), "ranges are pairs of whole numbers"
    cut = [min(max(end - start, 0), size) for end in ranges]
    pairs = [pair for pair in zip(cut[::2], cut[1::2], strict=True) if pair[0] < pair[1]]
    if pairs:
        told["undecayed"] = tuple(end for pair in pairs for end in pair)
    return call.model_copy(update={"attributes": told})


def _whole(told: Mapping[str, Attribute], name: str) -> int:
    value = told.get(name)
    if type(value) is not int:
        raise TwinstreamError(f"a call on a shard has {name} {value!r}, expected a whole number")
    return value
