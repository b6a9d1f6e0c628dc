"""A profile's memories and links as lists: read, and refused where nothing here runs with them.

    [[memories]]
    name = "GDDR6X"
    kind = "device"
    size_bytes = "24GiB"
    bytes_per_s = 1.008e12

    [[memories]]
    name = "DDR5"
    kind = "host"
    size_bytes = "64GiB"
    bytes_per_s = 83e9

    [[links]]
    from = "DDR5"
    to = "GDDR6X"
    bytes_per_s = 32e9
    back_bytes_per_s = 32e9
    both_bytes_per_s = 64e9
    latency_ns = 5000

They say the same as the fields of a machine, which is what planner, simulator and executor read.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from twinstream.hardware_profiles.errors import ProfileError
from twinstream.hardware_profiles.overrides import changed
from twinstream.hardware_profiles.profile_files import Profile, Text
from twinstream.hardware_profiles.schema import Number
from twinstream.schedule.node import Node
from twinstream.schedule.tensors import Tier, TierKind

_OF_MEMORY = {  # kind, and field of a memory: the machine's
    ("device", "size_bytes"): "device_memory_bytes",
    ("device", "bytes_per_s"): "hbm_bytes_per_s",
    ("host", "size_bytes"): "host_memory_bytes",
    ("host", "bytes_per_s"): "host_dram_bytes_per_s",
    ("disk", "size_bytes"): "disk_memory_bytes",
    ("disk", "endurance_bytes"): "disk_endurance_bytes",
}
_OF_LINK = {  # ends, and field of a link: the machine's
    ("host", "device"): {
        "bytes_per_s": "pcie_h2d_bytes_per_s",
        "back_bytes_per_s": "pcie_d2h_bytes_per_s",
        "both_bytes_per_s": "pcie_duplex_bytes_per_s",
        "latency_ns": "copy_latency_ns",
    },
    ("disk", "host"): {
        "bytes_per_s": "disk_read_bytes_per_s",
        "back_bytes_per_s": "disk_write_bytes_per_s",
        "both_bytes_per_s": "disk_overlap",
        "latency_ns": "disk_latency_ns",
    },
}
_POOL = "unified_memory_bytes"
_FIELDS = (*_OF_MEMORY.values(), *(f for one in _OF_LINK.values() for f in one.values()), _POOL)


class ListedMemory(Node):
    """One memory: its size, the rate of its own reads and writes, what addresses are multiples of;
    and the pool that it is a share of, if several are one. A disk may say what its maker warrants
    to be written to it."""

    name: Text
    kind: TierKind
    size_bytes: Number | None = None
    bytes_per_s: Number | None = None
    granularity_bytes: int | None = None
    pool: Text | None = None
    endurance_bytes: Number | None = None


class ListedLink(Node):
    """Rates between two memories: there, back, and of both ways together while both are under way
    alike; and what each copy takes beside its bytes. Without a rate back there is no way back."""

    source: Text = Field(alias="from")
    to: Text
    bytes_per_s: Number
    back_bytes_per_s: Number | None = None
    both_bytes_per_s: Number | None = None
    latency_ns: Number | None = None


class MemoryList(Profile):
    """All memories of a machine, and all links between them."""

    memories: tuple[ListedMemory, ...] = ()
    links: tuple[ListedLink, ...] = ()

    def faults(self) -> Iterator[str]:
        """Yield why nothing here runs with them, and what to do."""
        kinds: dict[TierKind, list[str]] = {"device": [], "host": [], "disk": []}
        for one in self.memories:
            kinds[one.kind].append(f"'{one.name}'")
            least = Tier(kind=one.kind).alignment_bytes
            if one.granularity_bytes is not None and least % max(1, one.granularity_bytes):
                yield (
                    f"addresses in '{one.name}' are multiples of {least} bytes here, which "
                    f"granularity_bytes = {one.granularity_bytes} does not divide"
                )
            of_disk = one.kind == "disk"
            for field in ("bytes_per_s", "pool") if of_disk else ("endurance_bytes",):
                if getattr(one, field) is not None:
                    has = "rates on its link, and is in no pool" if of_disk else "no endurance"
                    yield f"'{one.name}' is a {one.kind}, which has {has}: drop {field}"
        for kind, names in kinds.items():
            if len(names) > 1:
                told = f"{' and '.join(names)} are {len(names)} of kind {kind}"
                yield f"{told}, and one is used here: describe that alone"
            elif not names and kind != "disk":
                yield f"there is no memory of kind {kind}, and every step has some there: add it"
        pools = [one.pool for one in self.memories if one.kind != "disk"]
        if len(set(pools)) > 1:
            yield "of device and host one alone names a pool, or each another: name one in both"
        ends = [self._ends(link) for link in self.links]
        for link, (source, to) in zip(self.links, ends, strict=True):
            told = f"the link from '{link.source}' to '{link.to}'"
            if source is None or to is None:
                yield f"{told} names a memory that is not listed"
            elif {source, to} == {"disk", "device"}:
                yield f"{told}: what a disk holds passes through host memory here; link it there"
            elif (source, to) not in _OF_LINK:
                yield f"{told} goes from {source} to {to}: write host to device, or disk to host"
        for (source, to), links in Counter(ends).items():
            if links > 1 and source and to:
                yield f"{links} links go from {source} to {to}: add them up to one"
        if kinds["disk"] and ("disk", "host") not in ends:
            yield f"no link goes from {kinds['disk'][0]} to the host: add it"

    def fields(self) -> dict[str, Any]:
        """Return the fields of a machine with them; None where they say nothing of one."""
        found: dict[str, Any] = dict.fromkeys(_FIELDS)
        for one in self.memories:
            for (kind, field), name in _OF_MEMORY.items():
                if kind == one.kind:
                    found[name] = _table(getattr(one, field))
        for link in self.links:
            names = _OF_LINK[self._ends(link)]  # type: ignore[index] # there are no faults
            found |= {name: _table(getattr(link, field)) for field, name in names.items()}
            if "disk_overlap" in names.values():
                found["disk_overlap"] = _overlap(link)
        shares = [found["device_memory_bytes"], found["host_memory_bytes"]]
        if any(one.pool for one in self.memories) and all(shares):
            found[_POOL] = shares[0] | {"value": sum(share["value"] for share in shares)}
        return found

    def _ends(self, link: ListedLink) -> tuple[TierKind | None, TierKind | None]:
        kinds = {one.name: one.kind for one in self.memories}
        return kinds.get(link.source), kinds.get(link.to)


def with_listed_memories(document: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return a profile's document with fields in place of its lists, if it has such.

    Raises:
        ProfileError: nothing here runs with them, or fields say something of memories, too.
    """
    lists = {key: document[key] for key in ("memories", "links") if key in document}
    if not lists:
        return dict(document)
    named = {"name": document["name"], "description": ""}
    found = changed(MemoryList, named | lists, None, source)
    twice = [field for field in _FIELDS if field in document]
    beside = [f"{', '.join(twice)} and the lists both say it: leave out one"] if twice else []
    if faults := [*beside, *found.faults()]:
        raise ProfileError(f"{source}: {'; '.join(faults)}")
    return {key: value for key, value in document.items() if key not in lists} | found.fields()


def _table(number: Number | None) -> dict[str, Any] | None:
    return None if number is None else number.model_dump()


def _overlap(link: ListedLink) -> dict[str, Any] | None:
    """What both ways of a drive reach together, of what each reaches alone: 1, they take turns."""
    there, back, both = link.bytes_per_s, link.back_bytes_per_s, link.both_bytes_per_s
    if both is None or both.value is None or back is None or not there.value or not back.value:
        return None
    return both.model_dump() | {"value": 2 * both.value / (there.value + back.value)}
