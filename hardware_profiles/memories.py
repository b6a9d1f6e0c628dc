"""The links between the memories of a machine, as all rooms go through them."""

from dataclasses import dataclass

from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.tensors import TierKind


@dataclass(frozen=True)
class MemoryLink:
    """A way from one memory to another.

    Attributes:
        name: of the resource that a byte draws of, and of nothing else.
        rate_field: of a profile, its rate.
        latency_field: what each copy takes beside its bytes.
        shared: what a byte draws of, too, by name and field of a profile.
    """

    source: TierKind
    destination: TierKind
    name: str
    rate_field: str
    latency_field: str
    shared: tuple[tuple[str, str], ...]

    @property
    def resources(self) -> tuple[tuple[str, str], ...]:
        """Everything that its copies draw of, by name and field."""
        return ((self.name, self.rate_field), *self.shared)


_DRAM = ("host_dram", "host_dram_bytes_per_s")
_PCIE = (("pcie", "pcie_duplex_bytes_per_s"), ("hbm", "hbm_bytes_per_s"), _DRAM)
H2D = MemoryLink("host", "device", "h2d", "pcie_h2d_bytes_per_s", "copy_latency_ns", _PCIE)
D2H = MemoryLink("device", "host", "d2h", "pcie_d2h_bytes_per_s", "copy_latency_ns", _PCIE)
DISK_READS = MemoryLink(
    "disk", "host", "disk", "disk_read_bytes_per_s", "disk_latency_ns", (_DRAM,)
)
DISK_WRITES = MemoryLink(
    "host", "disk", "disk_write", "disk_write_bytes_per_s", "disk_latency_ns", (_DRAM,)
)
LINKS = (H2D, D2H, DISK_READS, DISK_WRITES)
DRIVE = "drive"  # the resource that reads and writes of a disk share: its time


def disk_links(machine: Machine) -> tuple[MemoryLink, ...]:
    """Return the links of a machine's drive, which has no writes where their rate is not stated."""
    writes = machine.disk_write_bytes_per_s is not None
    return (DISK_READS, DISK_WRITES) if writes else (DISK_READS,)


def drive_ns_per_byte(machine: Machine, link: MemoryLink) -> float:
    """Return the time of the drive that a byte of a link takes; a ns of it has `disk_overlap`."""
    return 1e9 / machine.rate(link.rate_field)
