"""`models` and `machines`: what there is to choose from."""

from twinstream.commands.arguments.options import Json
from twinstream.commands.output import print_json, print_report
from twinstream.hardware_profiles.loader import load_machine, machine_names
from twinstream.measures.uncertainty import uncertainty_of
from twinstream.models.presets import load_preset, preset_names
from twinstream.screens.tables import machines_table, models_table


def models(as_json: Json = False) -> None:
    """List the models that come with the package; --model also takes a Hugging Face config.json."""
    specs = [load_preset(name) for name in preset_names()]
    if as_json:
        sizes = [spec.model_dump() | {"num_parameters": spec.num_parameters} for spec in specs]
        print_json({"models": sizes})
    else:
        print_report(models_table(specs))


def machines(as_json: Json = False) -> None:
    """List the machine profiles that come with the package; --machine also takes a TOML file."""
    profiles = [load_machine(name) for name in machine_names()]
    if as_json:
        listed = [one.model_dump() | {"uncertainty": uncertainty_of(one)} for one in profiles]
        print_json({"machines": listed})
    else:
        print_report(
            machines_table(profiles),
            "A profile of your own inherits from one of these: "
            'base = "h100" and the numbers that differ, in a TOML file.',
        )
