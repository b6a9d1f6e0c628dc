"""Presets that transformers' own code computes, against what the hub says of their weights."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.front_door.command_line import call
from twinstream.models.presets import config_of, traced_presets

# Parameters of the files on the hub; gemma's have a SigLIP tower and a projector beside the text.
_TOWER, _TOWER_WIDTH = 416_866_032, 1152
_PUBLISHED = {
    "gemma-3-270m": 268_098_176, "gemma-3-1b": 999_885_952, "gemma-3-4b": 4_300_079_472,
    "gemma-3-12b": 12_187_325_040, "gemma-3-27b": 27_432_406_640, "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672, "phi-4-mini": 3_836_021_760,
}  # fmt: skip


@pytest.mark.parametrize("name", traced_presets())
def test_parameters_are_those_of_the_hub(name: str) -> None:
    config = AutoConfig.from_pretrained(str(config_of(name)))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = sum(one.numel() for one in model.parameters())
    beside = 0
    if name in ("gemma-3-4b", "gemma-3-12b", "gemma-3-27b"):
        beside = _TOWER + _TOWER_WIDTH * config.hidden_size + _TOWER_WIDTH
    assert found == traced_presets()[name] == _PUBLISHED[name] - beside


def test_it_is_planned_by_its_name_on_the_hub() -> None:
    model = ("--model", "google/gemma-3-1b-it", "--seq-len", 512, "--tokens-per-step", 1024)
    planned = call("plan", *model, "--machine", "rtx4090", "--effort", "quick", "--json").json()
    assert planned["model"] == "gemma-3-1b"
