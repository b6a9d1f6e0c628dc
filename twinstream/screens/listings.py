"""What there is to choose from: models, machines and clusters as tables of a terminal."""

from collections.abc import Mapping, Sequence

from rich.console import Group

from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.origin import origin_of
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.uncertainty import Uncertainty, usual_uncertainties
from twinstream.models.decoders.spec import ModelSpec
from twinstream.screens.tables import listing_table, number_text


def models_table(title: str, models: Sequence[ModelSpec]) -> Group:
    """Of a model with experts `d_ff` is one expert's, and `experts` how many of how many a token
    takes."""
    columns = "layers,d_model,heads (KV),d_ff,experts,vocabulary,parameters"
    table = listing_table(["name"], columns.split(","))
    table.columns[0].no_wrap = True
    wide = [spec.name for spec in models if spec.dtype == "float32"]
    told = f", of {', '.join(wide)} in float32" if wide else ""
    for spec in models:
        experts = spec.experts
        d_ff = spec.d_ff if experts is None else experts.d_ff
        shown = [
            f"{spec.num_layers:,}",
            f"{spec.d_model:,}",
            f"{spec.num_heads:,} ({spec.num_kv_heads:,})",
            f"{d_ff:,}",
            "-" if experts is None else f"{experts.per_token} of {experts.count}",
            f"{spec.vocab_size:,}",
        ]
        table.add_row(spec.name, *shown, _count(spec.num_parameters))
    return Group(title, table, f"Parameters are in bfloat16{told}.")


def machines_table(machines: Sequence[Machine]) -> Group:
    errors = usual_uncertainties(machines)
    columns = "bf16 TFLOP/s,HBM GB/s,H2D GB/s,D2H GB/s,both GB/s,device GiB,host GiB,error"
    table = listing_table(["name", "device"], columns.split(","))
    table.columns[0].no_wrap = True  # a name is there to be copied
    for machine, error in zip(machines, errors, strict=True):
        table.add_row(
            machine.name,
            machine.device,
            number_text(machine.peak_bf16_flop_per_s, 1e12),
            number_text(machine.hbm_bytes_per_s, 1e9),
            number_text(machine.pcie_h2d_bytes_per_s, 1e9),
            number_text(machine.pcie_d2h_bytes_per_s, 1e9),
            number_text(machine.pcie_duplex_bytes_per_s, 1e9),
            number_text(machine.device_memory_bytes, 2**30),
            number_text(machine.host_memory_bytes, 2**30),
            error.short.removeprefix("+/- "),
        )
    return Group("Machines", table, *_origins_told(machines), *_errors_told(machines, errors))


def _origins_told(machines: Sequence[Machine]) -> list[str]:
    """Where the speeds of each come from."""
    by_origin: dict[str, list[str]] = {}
    for machine in machines:
        by_origin.setdefault(origin_of(machine), []).append(machine.name)
    told = [f"  {origin}: {', '.join(names)}" for origin, names in sorted(by_origin.items())]
    return [
        "Peaks and rates are datasheets' where nothing else is said; what kernels reach is",
        *told,
    ]


def _errors_told(machines: Sequence[Machine], errors: Sequence[Uncertainty]) -> list[str]:
    """Of which machines it was measured how far predictions are off, and how."""
    by_kind: dict[str, list[str]] = {}
    for machine, error in zip(machines, errors, strict=True):
        by_kind.setdefault(error.why, []).append(machine.name)
    told = [f"  {why}: {', '.join(names)}" for why, names in by_kind.items()]
    return [
        "The error is expected of speeds that `plan` predicts for 8b at 8,192 tokens a sequence. "
        "Attention whose rate is not known adds to it; the rest is",
        *told,
    ]


def clusters_table(clusters: Sequence[Cluster]) -> Group:
    """What each cluster is made of; rates are nominal, of one direction."""
    columns = ("GPUs/node", "GPU GB/s", "NICs/node", "NIC GB/s", "most nodes", "curves")
    table = listing_table(("name", "node"), columns)
    table.columns[0].no_wrap = True  # a name is there to be copied
    for one in clusters:
        table.add_row(
            one.name,
            one.machine,
            number_text(one.gpus_per_node, 1),
            number_text(one.node_bytes_per_s, 1e9),
            number_text(one.nics_per_node, 1),
            number_text(one.nic_bytes_per_s, 1e9),
            number_text(one.most_nodes, 1),
            str(len(one.curves)),
        )
    return Group("Clusters", table)


def traced_line(parameters: Mapping[str, int]) -> str:
    """Presets that transformers' own code computes, by their parameters."""
    sizes = ", ".join(f"{name} ({_count(number)})" for name, number in parameters.items())
    return f"By transformers' own code, on one device: {sizes} parameters."


def _count(number: int) -> str:
    return f"{number / 1e9:.2f}e9" if number >= 1e9 else f"{number / 1e6:.2f}e6"
