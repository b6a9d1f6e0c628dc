"""What one of several ranks has of the machine that they share, and how they reach each other."""

import os
import re
from dataclasses import dataclass

from twinstream.hardware_profiles.clusters.loader import cluster_names, load_cluster
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.schema import Machine, Number

_RATES = (
    "peak_bf16_flop_per_s",
    "peak_fp32_flop_per_s",
    "hbm_bytes_per_s",
    "pcie_h2d_bytes_per_s",
    "pcie_d2h_bytes_per_s",
    "pcie_duplex_bytes_per_s",
)
_LATENCIES = ("launch_latency_ns", "copy_latency_ns", "event_wait_latency_ns")
_LOOPBACK_BYTES_PER_S, _LOOPBACK_NS = 1e9, 100_000
_ON_PCIE = "rtx4090_pc"
_NETWORK = {
    "nics_per_node": (1.0, "one port a machine"),
    "nic_bytes_per_s": (1.25e9, "10 Gbit/s Ethernet"),
    "network_efficiency": (0.9, "TCP over Ethernet"),
    "network_latency_ns": (100_000.0, "gloo over TCP, 100 us"),
}
_COPYING_SHARE = 0.5  # of a core, while bytes pass through sockets


def cores_here() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0))


def share_of_cores(num_ranks: int, num_cores: int) -> float:
    """What a rank has of the core that a device of its own would have.

    >>> share_of_cores(2, 4), share_of_cores(4, 2)
    (1.0, 0.5)
    """
    return min(1.0, num_cores / num_ranks)


def rank_machine(machine: Machine, num_ranks: int, num_cores: int) -> Machine:
    """The profile of one of several ranks whose compute streams share cores."""
    share = share_of_cores(num_ranks, num_cores)
    if share == 1.0:
        return machine
    changes: dict[str, object] = {"name": f"{machine.name}, {share:.2g} of a core"}
    for field in (*_RATES, *_LATENCIES):
        number: Number | None = getattr(machine, field)
        if number is not None and number.value is not None:
            value = number.value * share if field in _RATES else number.value / share
            changes[field] = number.model_copy(update={"value": value})
    return machine.model_copy(update=changes)


@dataclass(frozen=True)
class Place:
    """A cluster and the profile of its nodes; `assumed` is what nobody measured, or empty."""

    cluster: Cluster
    machine: Machine
    assumed: str = ""


def place_here(
    machine: Machine, num_ranks: int, num_cores: int, nvlink: bool | None = None, num_hosts: int = 1
) -> Place:
    """So many ranks on this machine, and on each other: a GPU each, or processes that share cores.

    Nobody has measured the links between them. Those of GPUs are as a shipped cluster of the same
    GPUs has them, else PCIe that all of them share with nobody; those of machines 10 Gbit/s.

    Args:
        nvlink: whether GPUs are known to be linked by it, or not to be.
    """
    found = _one_machine(machine, num_ranks, num_cores, nvlink)
    if num_hosts == 1:
        return found
    network, told = found.cluster, "the network of that cluster between machines"
    if network.nic_bytes_per_s is None:
        told = "10 Gbit/s and 100 us between machines"
        network = network.model_copy(
            update={name: _assumed(*one) for name, one in _NETWORK.items()}
        )
    return Place(network, found.machine, f"{found.assumed}; {told}")


def _one_machine(machine: Machine, num_ranks: int, num_cores: int, nvlink: bool | None) -> Place:
    if machine.device != "cpu":
        cluster, links = _of_gpus(machine, num_ranks, nvlink)
        return Place(cluster, machine, links)
    share = share_of_cores(num_ranks, num_cores)
    shared = f"{num_ranks} ranks share {num_cores} cores, {share:.2g} each; " if share < 1 else ""
    told = f"{shared}links of 1 GB/s and 100 us (gloo over loopback)"
    return Place(
        _over_loopback(machine, num_ranks), rank_machine(machine, num_ranks, num_cores), told
    )


def _of_gpus(machine: Machine, num_ranks: int, nvlink: bool | None) -> tuple[Cluster, str]:
    """And what it assumes."""
    names = (_ON_PCIE,) if nvlink is False else cluster_names()
    shipped = [load_cluster(name) for name in names]
    alike = [
        one for one in shipped if re.sub("_(training|datasheet)$", "", one.machine) == machine.name
    ]
    changes: dict[str, object] = {
        "name": "this machine", "machine": machine.name, "curves": (),
        "machine_changes": {},
        "gpus_per_node": _assumed(num_ranks, "as many ranks as asked for"),
    }  # fmt: skip
    if alike:
        told = f"links between GPUs as {alike[0].name} has them"
        base = alike[0]
    else:
        base, link = load_cluster(_ON_PCIE), machine.pcie_d2h_bytes_per_s
        told = f"GPUs linked by PCIe alone, as in {_ON_PCIE}"
        if link is not None and link.value is not None:
            changes["node_bytes_per_s"] = _assumed(link.value, "the PCIe link to the host")
            changes["node_efficiency"] = _assumed(1.0, "node_bytes_per_s is what is reached")
    described = {"description": f"{num_ranks} {machine.name} on one machine; {told}"}
    return base.model_copy(update=changes | described), told


def _over_loopback(machine: Machine, num_ranks: int) -> Cluster:
    return Cluster(
        name="this machine",
        description=f"{num_ranks} processes on {machine.name}, linked by gloo over loopback",
        machine=machine.name,
        gpus_per_node=_assumed(num_ranks, "as many ranks as asked for"),
        node_bytes_per_s=_assumed(_LOOPBACK_BYTES_PER_S, "gloo over loopback, 1 GB/s"),
        node_efficiency=_assumed(1.0, "node_bytes_per_s is what is reached"),
        compute_lost=_assumed(_COPYING_SHARE, "both ends copy through the kernel"),
        collective_latency_ns=_assumed(_LOOPBACK_NS, "gloo over loopback, 100 us"),
        node_latency_ns=_assumed(_LOOPBACK_NS, "gloo over loopback, 100 us"),
    )


def _assumed(value: float, source: str) -> Number:
    return Number(value=value, kind="assumed", source=source)
