"""The CPUs near the GPU: memory that they touch first lies on its side of the machine."""

import contextlib
from pathlib import Path


def cpus_near(pci_address: str, root: Path = Path("/")) -> set[int]:
    """CPUs of the NUMA node that a PCI device hangs on; empty where the system does not say.

    `pci_address` as in sysfs, `0000:3b:00.0`. A machine of one node says -1.
    """
    with contextlib.suppress(OSError, ValueError):  # also an empty address: a folder
        device = root / "sys/bus/pci/devices" / pci_address.lower()
        node = int((device / "numa_node").read_text())
        if node >= 0:
            listed = (root / f"sys/devices/system/node/node{node}/cpulist").read_text()
            return _cpus_of(listed)
    return set()


def _cpus_of(text: str) -> set[int]:
    """Of a list as the kernel writes it: "0-2,8" has 0, 1, 2 and 8."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus
