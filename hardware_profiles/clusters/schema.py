"""The profile of a cluster: a node, the links inside it, the network between nodes, curves."""

from typing import Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from twinstream.hardware_profiles.clusters.curves import CollectiveCurve
from twinstream.hardware_profiles.errors import ClusterSizeError, MissingNetworkNumberError
from twinstream.hardware_profiles.profile_files import Profile, Text
from twinstream.hardware_profiles.schema import Number
from twinstream.schedule.node import Node

COUNT_FIELDS = ("gpus_per_node", "nics_per_node", "most_nodes")
RATE_FIELDS = ("node_bytes_per_s", "nic_bytes_per_s")
SHARE_FIELDS = (
    "node_efficiency",
    "node_in_switch_efficiency",
    "network_efficiency",
    "network_in_switch_efficiency",
    "compute_lost",
    "tp_exposed",
    "nic_on_pcie",
)
_FROM_NONE = ("compute_lost", "tp_exposed", "nic_on_pcie")
LATENCY_FIELDS = ("collective_latency_ns", "node_latency_ns", "network_latency_ns")
CLUSTER_NUMBERS = (*COUNT_FIELDS, *RATE_FIELDS, *SHARE_FIELDS, *LATENCY_FIELDS)
# What a curve of the tier was measured on: a profile that changes one keeps no curve of its base.
NODE_FIELDS = (
    *("gpus_per_node", "node_bytes_per_s", "node_efficiency", "node_latency_ns"),
    *("node_in_switch_efficiency", "collective_latency_ns"),
)
NETWORK_FIELDS = (
    *("nics_per_node", "nic_bytes_per_s", "network_efficiency", "network_latency_ns"),
    "network_in_switch_efficiency",
)

_LEAST_RATE, _MOST_RATE, _MOST_LATENCY, _MOST_COUNT = 1e5, 1e16, 1e10, 2**20


class Level(Node):
    """One level of the network's switches, from the nodes up.

    `nodes`: how many nodes hang below one switch (or group of switches) of the level, its radix.
    `oversubscription`: how many times what comes from below exceeds what can pass the level.
    `latency_ns`: what passing the level adds to a message, up and down.
    """

    name: Text
    nodes: Number
    oversubscription: Number
    latency_ns: Number

    @model_validator(mode="after")
    def _numbers_are_possible(self) -> Self:
        for field, least in (("nodes", 2), ("oversubscription", 1), ("latency_ns", 0)):
            value = getattr(self, field).value
            if value is None or value < least:
                raise PydanticCustomError(
                    "level_number", f"{field} is {value}, and needs {least} or more"
                )
        return self


class Cluster(Profile):
    """Equal nodes of GPUs, linked inside by one fabric and to each other by NICs and switches.

    A field that is None is unknown: using it raises `MissingNetworkNumberError`; an in-switch
    efficiency that is None means that switches do not reduce. Rates are per direction, nominal:
    `node_bytes_per_s` what one GPU sends to its node's others, `nic_bytes_per_s` one NIC. Each
    GPU uses the NICs of its own rail, `nics_per_node / gpus_per_node` of them, at least one.
    Efficiencies are the share of the nominal rate that large collectives reach.
    `collective_latency_ns` is what a collective takes to start, `node_latency_ns` and
    `network_latency_ns` what each step costs between GPUs of a node and of two nodes, without
    what `levels` add. `compute_lost` is the share of a GPU's compute that a running collective
    takes, `tp_exposed` the share of the time of tensor parallelism's collectives that compute
    waits for where they run in pieces beside products. `nic_on_pcie` is 1 where what NICs send and
    receive passes the GPU's own PCIe link (a switch above both), 0 where it does not or is unknown.

    `machine` names the profile of a node (device, host and the link between them) or a TOML file;
    `machine_changes` replaces numbers of it.
    """

    machine: Text
    gpus_per_node: Number | None = None
    nics_per_node: Number | None = None
    most_nodes: Number | None = None
    node_bytes_per_s: Number | None = None
    nic_bytes_per_s: Number | None = None
    node_efficiency: Number | None = None
    node_in_switch_efficiency: Number | None = None
    network_efficiency: Number | None = None
    network_in_switch_efficiency: Number | None = None
    compute_lost: Number | None = None
    tp_exposed: Number | None = None
    nic_on_pcie: Number | None = None
    collective_latency_ns: Number | None = None
    node_latency_ns: Number | None = None
    network_latency_ns: Number | None = None
    machine_changes: dict[str, Number] = Field(default_factory=dict)
    levels: tuple[Level, ...] = ()
    curves: tuple[CollectiveCurve, ...] = ()

    @field_validator(*CLUSTER_NUMBERS)
    @classmethod
    def _numbers_are_possible(cls, number: Number | None, info: ValidationInfo) -> Number | None:
        if number is not None and (fault := _fault(str(info.field_name), number.value)):
            raise PydanticCustomError("cluster_number", fault)
        return number

    @model_validator(mode="after")
    def _levels_rise_and_curves_differ(self) -> Self:
        sizes = [level.nodes.value or 0 for level in self.levels]
        if sizes != sorted(set(sizes)):
            raise PydanticCustomError("levels_rise", "levels must rise from few nodes to many")
        keys = [curve.key for curve in self.curves]
        if twice := sorted({key for key in keys if keys.count(key) > 1}):
            raise PydanticCustomError("curve_twice", f"two curves are of {twice[0]}")
        return self

    def number(self, field: str) -> float:
        """The stated value of a field.

        Raises:
            MissingNetworkNumberError: the profile does not state it.
        """
        assert field in CLUSTER_NUMBERS, f"no number of a cluster is called {field!r}"
        number: Number | None = getattr(self, field)
        if number is None or number.value is None:
            raise MissingNetworkNumberError(cluster=self.name, field=field)
        return number.value

    def require_gpus(self, num_gpus: int) -> None:
        """Refuse more GPUs than the cluster has; one that states no number of nodes has them all.

        Raises:
            ClusterSizeError: it has fewer.
        """
        if self.most_nodes is None:
            return
        per_node, most = self.count("gpus_per_node"), self.count("most_nodes")
        if num_gpus > per_node * most:
            raise ClusterSizeError(
                f"{num_gpus:,} GPUs are more than the {per_node * most:,} of cluster "
                f"'{self.name}', {most:,} nodes of {per_node}: ask for fewer, or state most_nodes "
                f'in a profile of your own that begins with base = "{self.name}"'
            )

    def count(self, field: str) -> int:
        """The stated value of a field that counts."""
        return int(self.number(field))


def _fault(field: str, value: float | None) -> str | None:
    """Say what is wrong with a field's value."""
    if value is None:
        return "a link, a count or a latency of a cluster cannot be unconstrained"
    if field in COUNT_FIELDS and not (1 <= value <= _MOST_COUNT and value % 1 == 0):
        return f"{value:g} is no count from 1 to {_MOST_COUNT}"
    if field in RATE_FIELDS and not _LEAST_RATE <= value <= _MOST_RATE:
        return (
            f"{value:g} is so many bytes a second; {value:g} GB/s are {value * 1e9:g}, and "
            f"{value:g} Gb/s are {value * 1.25e8:g}"
        )
    if field in SHARE_FIELDS:
        least, most = (0.0, 1.0) if field in _FROM_NONE else (1e-3, 1.5)
        if not least <= value <= most:
            return f"{value:g} is no share from {least:g} to {most:g}"
    if field in LATENCY_FIELDS and value > _MOST_LATENCY:
        return f"{value:g} ns is more than any network takes"
    return None
