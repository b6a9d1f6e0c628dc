"""Memories and links as lists say the same as the fields of a profile, or are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from twinstream.hardware_profiles.errors import ProfileError
from twinstream.hardware_profiles.loader import load_machine, load_machine_text
from twinstream.hardware_profiles.schema import Machine

DEVICE = {"name": "GDDR6X", "kind": "device", "size_bytes": "24GiB", "bytes_per_s": 1e12}
HOST = {"name": "DDR5", "kind": "host", "size_bytes": "64GiB", "bytes_per_s": 8e10}
DISK = {"name": "nvme", "kind": "disk", "size_bytes": "2TB", "granularity_bytes": 512}
PCIE = {
    "from": "DDR5", "to": "GDDR6X", "bytes_per_s": 32e9, "back_bytes_per_s": 32e9,
    "both_bytes_per_s": 64e9, "latency_ns": 5000,
}  # fmt: skip
DRIVE = {
    "from": "nvme", "to": "DDR5", "bytes_per_s": 7e9, "back_bytes_per_s": 5e9,
    "both_bytes_per_s": 9e9, "latency_ns": 1e5,
}  # fmt: skip


def table(values: dict[str, Any]) -> str:
    """As TOML has a table."""
    pairs = (f"{key} = {table(one)}" if isinstance(one, dict) else f"{key} = {json.dumps(one)}"
             for key, one in values.items())  # fmt: skip
    return f"{{ {', '.join(pairs)} }}"


def listed(memories: list[dict[str, Any]], links: list[dict[str, Any]], *lines: str) -> Machine:
    """The RTX 4090 with these memories."""
    lists = {"memories": memories, "links": links}
    text = [f"{name} = [{', '.join(map(table, each))}]" for name, each in lists.items()]
    return load_machine_text("\n".join(['base = "rtx4090"', *lines, *text]), "here.toml")


def test_lists_are_the_fields_of_a_machine() -> None:
    found = listed([DEVICE, HOST, DISK], [PCIE, DRIVE])
    assert found.number("device_memory_bytes") == 24 * 2**30
    assert found.number("host_memory_bytes") == 64 * 2**30
    assert found.number("hbm_bytes_per_s") == 1e12
    assert found.number("pcie_duplex_bytes_per_s") == 64e9
    assert found.number("disk_read_bytes_per_s") == 7e9
    assert found.number("disk_write_bytes_per_s") == 5e9
    # alike, 1.5 of what each does alone: (7 + 5) / 2 x 1.5 = 9 GB/s
    assert found.number("disk_overlap") == 1.5
    assert found.number("disk_latency_ns") == 1e5
    without = listed([DEVICE, HOST], [PCIE])
    assert without.disk_read_bytes_per_s is None and without.disk_memory_bytes is None
    read_only = {key: DRIVE[key] for key in ("from", "to", "bytes_per_s", "latency_ns")}
    assert listed([DEVICE, HOST, DISK], [PCIE, read_only]).disk_write_bytes_per_s is None


def test_a_shipped_machine_written_as_lists_is_that_machine() -> None:
    """With the kinds and sources of its numbers: all that plans follow from is the same."""
    was = load_machine("rtx4090")

    def number(field: str) -> dict[str, Any]:
        found: dict[str, Any] = getattr(was, field).model_dump()
        return found

    device = {"size_bytes": number("device_memory_bytes"), "bytes_per_s": number("hbm_bytes_per_s")}
    host = {
        "size_bytes": number("host_memory_bytes"),
        "bytes_per_s": number("host_dram_bytes_per_s"),
    }
    link = {
        "bytes_per_s": number("pcie_h2d_bytes_per_s"),
        "back_bytes_per_s": number("pcie_d2h_bytes_per_s"),
        "both_bytes_per_s": number("pcie_duplex_bytes_per_s"),
        "latency_ns": number("copy_latency_ns"),
    }  # fmt: skip
    names = f'name = "rtx4090"\ndescription = {json.dumps(was.description)}'
    found = listed([DEVICE | device, HOST | host], [PCIE | link], names)
    assert found == was and found.content_hash == was.content_hash


def test_memories_of_a_pool_are_shares_of_it() -> None:
    pool = {"pool": "LPDDR5X"}
    found = listed([DEVICE | pool, HOST | pool], [])
    assert found.pool_bytes == 88 * 2**30


@pytest.mark.parametrize(
    ("memories", "links", "why"),
    [
        ([DEVICE, HOST, DISK, DISK | {"name": "two"}], [PCIE, DRIVE], "'two' are 2 of kind disk"),
        ([HOST], [], "no memory of kind device"),
        ([DEVICE, HOST, DISK], [PCIE, DRIVE | {"to": "GDDR6X"}], "passes through host memory"),
        ([DEVICE, HOST, DISK], [PCIE], "no link goes from 'nvme' to the host: add it"),
        ([DEVICE, HOST], [PCIE | {"from": "GDDR6X", "to": "DDR5"}], "write host to device"),
        ([DEVICE, HOST], [PCIE, PCIE], "2 links go from host to device: add them up"),
        ([DEVICE, HOST], [PCIE | {"to": "HBM"}], "names a memory that is not listed"),
        ([DEVICE | {"pool": "one"}, HOST], [PCIE], "name one in both"),
        ([DEVICE | {"granularity_bytes": 1000}, HOST], [PCIE], "are multiples of 256 bytes"),
        ([DEVICE, HOST, DISK | {"bytes_per_s": 1e9}], [PCIE, DRIVE], "drop bytes_per_s"),
        ([DEVICE, HOST | {"endurance_bytes": "1TB"}], [PCIE], "drop endurance_bytes"),
        ([DEVICE | {"sort": "fast"}, HOST], [PCIE], "unknown field 'memories.0.sort'"),
    ],
)  # fmt: skip
def test_lists_that_nothing_here_runs_with_are_refused(
    memories: list[dict[str, Any]], links: list[dict[str, Any]], why: str
) -> None:
    with pytest.raises(ProfileError, match=f"here.toml: .*{why}") as refused:
        listed(memories, links)
    assert "\n" not in str(refused.value)


def test_lists_and_fields_do_not_both_say_it(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="host_memory_bytes and the lists both say it"):
        listed([DEVICE, HOST], [PCIE], 'host_memory_bytes = "64GiB"')
