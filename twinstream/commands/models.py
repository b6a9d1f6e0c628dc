"""`models`, `machines` and `clusters`: what there is to choose from."""

from twinstream.commands.arguments.options import Json
from twinstream.commands.output import print_json, print_report
from twinstream.hardware_profiles.clusters.loader import cluster_names, load_cluster
from twinstream.hardware_profiles.loader import load_machine, machine_names
from twinstream.hardware_profiles.origin import origin_of
from twinstream.measures.uncertainty import usual_uncertainties
from twinstream.models.layered.model import layered_names
from twinstream.models.presets import load_preset, preset_aliases, preset_names, traced_presets
from twinstream.screens.listings import clusters_table, machines_table, models_table, traced_line


def models(as_json: Json = False) -> None:
    """List the models that come with the package; --model also takes a Hugging Face config.json."""
    specs = [load_preset(name) for name in preset_names()]
    refusals = {spec.name: spec.executor_refusal for spec in specs}
    if as_json:
        sizes = [
            spec.model_dump()
            | {"num_parameters": spec.num_parameters, "not_run_here": refusals[spec.name]}
            for spec in specs
        ]
        print_json({"models": sizes, "traced": traced_presets()})
    else:
        run = [spec for spec in specs if refusals[spec.name] is None]
        priced = [spec for spec in specs if refusals[spec.name] is not None]
        layered = ", ".join(layered_names())
        aliases = ", ".join(f"{alias} is {name}" for alias, name in preset_aliases().items())
        print_report(
            models_table("Models", run),
            models_table("Planned for clusters, not run here", priced),
            traced_line(traced_presets()),
            f"Planned by their sizes (--seq-len 1: a sample), not run: {layered}; tables larger "
            "than a device by `twinstream estimate`.",
            f"Other names: {aliases}; and the hub's, such as Qwen/Qwen3-8B, in any case.",
        )


def machines(as_json: Json = False) -> None:
    """List the machine profiles that come with the package; --machine also takes a TOML file."""
    profiles = [load_machine(name) for name in machine_names()]
    if as_json:
        errors = usual_uncertainties(profiles)
        listed = [
            one.model_dump() | {"uncertainty": error, "origin": origin_of(one)}
            for one, error in zip(profiles, errors, strict=True)
        ]
        print_json({"machines": listed})
    else:
        print_report(
            machines_table(profiles),
            "A profile of your own inherits from one of these: "
            'base = "h100" and the numbers that differ, in a TOML file.',
        )


def clusters(as_json: Json = False) -> None:
    """List the cluster profiles that come with the package: nodes, links, networks, curves."""
    profiles = [load_cluster(name) for name in cluster_names()]
    if as_json:
        print_json({"clusters": [one.model_dump() for one in profiles]})
    else:
        print_report(
            clusters_table(profiles),
            "A cluster of your own inherits from one of these: "
            'base = "h100_dgx" and the numbers that differ, in a TOML file; what nccl-tests '
            "printed there makes its curves: twinstream calibrate --collectives FILE --cluster "
            "MINE.toml -o OUT.toml.",
        )
