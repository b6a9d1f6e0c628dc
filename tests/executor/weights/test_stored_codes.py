"""Matrices stored as codes: read as the values of their definitions, or refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.executor.weights import coded_folders as by
from tests.executor.weights.small_models import random_model, save
from tests.helpers.hf_weights import unpack_hf_state
from tests.traced.test_trained import write_model
from twinstream.executor.modules.tracing import trace
from twinstream.executor.providers.decoders import Decoders
from twinstream.executor.weights.codes import scaled
from twinstream.executor.weights.codes.coded_tensor import CodedTensor
from twinstream.executor.weights.errors import WeightsError
from twinstream.executor.weights.hf_files import as_values
from twinstream.executor.weights.hf_folder import stored_tensors
from twinstream.executor.weights.safetensors_header import StoredTensor, read_header
from twinstream.executor.weights.traced.module_folder import loaded_module, read_module_parameters
from twinstream.executor.weights.traced.module_weights import flat_groups
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.providers.traced import ModuleSource
from twinstream.models.recipes.lora import lora_of
from twinstream.models.recipes.recipe import Recipe

W = "a.weight"
DEFINED: dict[str, Callable[[], by.Coded]] = {
    "fp8 in blocks": lambda: by.fp8_blocks(W, (300, 200), 128),
    "fp8 in one block": lambda: by.fp8_blocks(W, (48, 80), 128),
    "fp8 by row": lambda: by.fp8_rows(W, (70, 48)),
    "fp8 as a whole": lambda: by.fp8_whole(W, (70, 48)),
    "fp8 of experts by column": lambda: by.fp8_experts(W, (3, 48, 40), (3, 1, 40)),
    "fp8 of experts by row": lambda: by.fp8_experts(W, (3, 48, 40), (3, 48, 1)),
    "fp8 of whole experts": lambda: by.fp8_experts(W, (3, 48, 40), (3,)),
    "mxfp8": lambda: by.mxfp8(W, (70, 96)),
    "packed fp4": lambda: by.packed_fp4(W, (70, 96)),
    "int8 of bitsandbytes": lambda: by.int8(W, (70, 48)),
    "int8 of one row": lambda: by.int8(W, (1, 48)),
    "int8 by row": lambda: by.int8_rows(W, (70, 48)),
    "nf4": lambda: by.four_bits(W, (64, 48)),
    "nf4 in blocks of 128": lambda: by.four_bits(W, (64, 48), block=128),
    "nf4, the last block not full, odd": lambda: by.four_bits(W, (7, 11)),
    "nf4, doubly quantised": lambda: by.four_bits(W, (700, 48), double=True),
    "nf4 stored as bfloat16": lambda: by.four_bits(W, (64, 48), storage=torch.bfloat16),
    "nf4 stored as float32": lambda: by.four_bits(W, (64, 48), storage=torch.float32),
    "fp4": lambda: by.four_bits(W, (64, 48), "fp4"),
    "fp4, doubly quantised": lambda: by.four_bits(W, (700, 48), "fp4", 128, double=True),
    "mxfp4": lambda: by.mxfp4(W, (3, 64, 40)),
}


def headers(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, StoredTensor]:
    file = folder / "model.safetensors"
    save_file({name: one.contiguous() for name, one in tensors.items()}, file)
    return read_header(file)


@pytest.mark.parametrize("what", DEFINED)
def test_values_are_those_of_the_definition(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit; int8 of bitsandbytes multiplies by a rounded 1/127 (one unit in the last place
    either way)."""
    monkeypatch.setattr(scaled, "AT_A_TIME", 500)  # rows go in several pieces
    stored, values = DEFINED[what]()
    beside = {"a.bias": torch.ones(3)}
    found = as_values(headers(tmp_path, stored | beside), None)
    assert found.keys() == {W, "a.bias"}
    matrix = found[W]
    assert isinstance(matrix, CodedTensor) and matrix.shape == values.shape
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.full(values.shape, torch.nan, dtype=dtype)
        matrix.decode_into(out)
        wanted = torch.from_numpy(np.ascontiguousarray(values)).to(dtype)
        if what in ("int8 of bitsandbytes", "int8 of one row"):
            assert torch.allclose(out, wanted, rtol=2e-7 if dtype == torch.float32 else 4e-3)
        else:
            assert torch.equal(out, wanted)


def without(part: str) -> Callable[[by.Stored], by.Stored]:
    return lambda stored: {n: t for n, t in stored.items() if not n.endswith(part)}


def put(name: str, tensor: torch.Tensor) -> Callable[[by.Stored], by.Stored]:
    return lambda stored: stored | {name: tensor}


def told(**changes: Any) -> Callable[[by.Stored], by.Stored]:
    """Another quant_state."""

    def change(stored: by.Stored) -> by.Stored:
        name = f"{W}.{by.STATE}nf4"
        return stored | {name: by.state(json.loads(bytes(stored[name].tolist())) | changes)}

    return change


def as_is(text: bytes) -> Callable[[by.Stored], by.Stored]:
    return put(f"{W}.{by.STATE}nf4", by.state(text))


NESTED = by.four_bits(W, (700, 48), double=True)[0]
NF4 = by.four_bits(W, (64, 48))[0]
FP8 = by.fp8_blocks(W, (300, 200), 128)[0]
INT8 = by.int8(W, (70, 48))[0]
MXFP4 = by.mxfp4(W, (3, 64, 40))[0]
DAMAGED: list[tuple[by.Stored, Callable[[by.Stored], by.Stored], str]] = [
    *((NESTED, told(shape=shape), "shape") for shape in
      (5, None, [], [0, 3], [-1, 2], ["x"], [True], [48, 10**30], [64, 48.0], [[64]])),
    *((NESTED, told(blocksize=size), "blocksize") for size in (0, -64, 63, "x", None, 10**12)),
    *((NESTED, told(nested_blocksize=size), "nested_blocksize") for size in
      (0, -1, 10**12, "x", None, float("nan"), 256.0, True)),
    *((NESTED, told(nested_offset=offset), "nested_offset") for offset in
      (None, "x", [], float("inf"), float("nan"), 1e300, 10**400, True)),
    (NESTED, told(quant_type="fp4"), "quant_type"), (NF4, told(quant_type=None), "quant_type"),
    (NESTED, as_is(b"[" * 50_000), "no JSON object"), (NF4, as_is(b"[1]"), "no JSON object"),
    (NF4, as_is(b"\xff{}"), "no JSON object"), (NF4, as_is(b""), "no JSON object"),
    (NF4, as_is(b'{"shape": ' + b"9" * 5000 + b"}"), "no JSON object"),
    (NF4, as_is(b" " * 70_000 + b"{}"), "no JSON object"),
    (NESTED, without(".nested_absmax"), "nested_absmax"), (NF4, without(".absmax"), "no absmax"),
    (NESTED, without(".nested_quant_map"), "nested_quant_map"), (NF4, without(W), "no codes"),
    (NF4, without(".quant_map"), "no quant_map"), (NF4, without("nf4"), "no codes that they"),
    (NESTED, put(f"{W}.nested_quant_map", torch.zeros(10)), "nested_quant_map of [10]"),
    (NESTED, put(f"{W}.nested_quant_map", torch.zeros(16, 16)), "nested_quant_map of [16, 16]"),
    (NESTED, put(f"{W}.nested_absmax", torch.zeros(0)), "nested_absmax of [0]"),
    (NESTED, put(f"{W}.absmax", torch.zeros(525)), "absmax of [525] in F32"),
    (NF4, put(f"{W}.absmax", torch.zeros(48, dtype=torch.uint8)), "absmax of [48] in U8"),
    (NF4, put(f"{W}.quant_map", torch.from_numpy(by.FP4.copy())), "not the 16 levels of nf4"),
    (NF4, put(f"{W}.quant_map", torch.full((16,), torch.nan)), "not the 16 levels of nf4"),
    (NF4, put(f"{W}.quant_map", torch.zeros(3)), "quant_map of [3]"),
    (NF4, put(W, torch.zeros(1536)), "6144 bytes of codes"),
    (FP8, without("_inv"), "no scales beside it (weight_scale_inv, weight_scale, SCB, scale)"),
    (FP8, without(W), "no codes that they belong to"),
    (FP8, put(W, torch.zeros(300, 200).bfloat16()), "no codes that they belong to"),
    (FP8, put(f"{W}_scale_inv", torch.ones(4, 2)), "do not belong together"),
    (FP8, put(f"{W}_scale_inv", torch.ones(3, 2, dtype=torch.int32)), "do not belong together"),
    (FP8, put(f"{W}_zero_point", torch.ones(300, 1)), "codes that are not read"),
    (INT8, without("SCB"), "no scales beside it"), (INT8, without(W), "no codes that they"),
    (INT8, put("a.SCB", torch.ones(48)), "do not belong together"),
    (INT8, put("a.weight_format", torch.tensor(2, dtype=torch.uint8)), "weight_format"),
    (MXFP4, without("_scales"), "no a.weight_scales"), (MXFP4, without("_blocks"), "codes, and"),
    (MXFP4, put(f"{W}_scales", torch.zeros(3, 40, 3, dtype=torch.uint8)), "MXFP4 has"),
    (MXFP4, put(W, torch.ones(3, 64, 40)), "twice"),
    ({}, put("a.qweight", torch.ones(6, 6, dtype=torch.int32)), "GPTQ, AWQ"),
    ({}, put(W, torch.ones(6, 6).to(torch.float8_e5m2)), "no scales"),
    ({}, put("a.norm", torch.ones(6).to(torch.float8_e4m3fn)), "no scales"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(DAMAGED)))
def test_what_is_damaged_is_refused_with_file_and_tensor(number: int, tmp_path: Path) -> None:
    stored, change, says = DAMAGED[number]
    with pytest.raises(WeightsError, match=r"model\.safetensors: has a") as caught:
        as_values(headers(tmp_path, change(stored)), None)
    assert says in str(caught.value) and "\n" not in str(caught.value), caught.value


@pytest.mark.parametrize("end", ["_scale_inv", ".absmax"])
def test_scales_that_are_no_numbers_are_refused_when_they_are_read(
    end: str, tmp_path: Path
) -> None:
    stored = dict(FP8 if end == "_scale_inv" else NF4)
    stored[W + end] = torch.full_like(stored[W + end], torch.nan)
    found = as_values(headers(tmp_path, stored), None)[W]
    assert isinstance(found, CodedTensor)
    with pytest.raises(WeightsError, match=r"scales of a\.weight, .* are infinite or no"):
        found.decode_into(torch.empty(found.shape))


def is_linear(name: str) -> bool:
    return "proj" in name or "experts" in name


@pytest.mark.parametrize("kind", by.KINDS)
@pytest.mark.parametrize("base", ["model", "nf4"])
def test_our_kernels_have_the_same_of_codes_as_of_their_values(
    kind: str, base: Any, tmp_path: Path
) -> None:
    """With a base in nf4, too, which keeps the codes of NF4."""
    folder = tmp_path / "model"
    spec = save(random_model("llama_stretched", torch.float32), folder)
    by.encode(folder, tmp_path / "values", kind, is_linear)
    assert ModelSpec.from_hf_config(folder).model_copy(update={"name": spec.name}) == spec
    recipe = Recipe(lora=lora_of("r=4"), base=base)
    read = dict(Decoders().parameters(folder, spec, recipe))
    for group, flat in Decoders().parameters(tmp_path / "values", spec, recipe):
        if kind == "int8":  # within a unit in the last place: see above
            assert base == "nf4" or torch.allclose(
                read[group].view(torch.float32), flat.view(torch.float32), rtol=2e-7
            )
        else:
            assert torch.equal(read[group], flat), group


def test_routers_that_are_coded_are_read_as_values(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    spec = save(random_model("qwen2_moe", torch.float32), folder)
    by.encode(folder, tmp_path / "values", "nf4", lambda name: ".layers." in name)
    recipe = Recipe(lora=lora_of("r=4"), base="nf4")
    read = dict(Decoders().parameters(folder, spec, recipe))
    for group, flat in Decoders().parameters(tmp_path / "values", spec, recipe):
        assert torch.equal(read[group], flat), group


def flats_of(folder: Path, spec: ModelSpec) -> dict[str, torch.Tensor]:
    flats = dict(Decoders().parameters(folder, spec, Recipe()))
    ends = ("embedding", "head")
    return {name if name in ends else f"layer.{name}": flat for name, flat in flats.items()}


@pytest.mark.parametrize("name", ["llama_stretched", "qwen3_moe", "mixtral"])
def test_fp8_of_our_kernels_is_what_transformers_dequantizes(name: str, tmp_path: Path) -> None:
    """Experts are stored one by one."""
    folder = tmp_path / "model"
    spec = save(random_model(name, torch.bfloat16), folder)
    by.encode(folder, tmp_path / "values", "fp8", is_linear)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    ours = unpack_hf_state(spec, flats_of(folder, spec))
    assert ours and all(torch.equal(tensor, theirs[at]) for at, tensor in ours.items())


@pytest.mark.parametrize(
    ("family", "kind", "dtype"),
    [("deepseek_v3", "fp8", "float32"), ("gpt_oss", "mxfp4", "bfloat16")],
)
def test_a_traced_module_has_what_transformers_dequantizes(
    family: str, kind: str, dtype: Any, tmp_path: Path
) -> None:
    """Group by group, experts that are stored one by one too, and whole; bytes without scales are
    refused, whether transformers makes the module's tensors of others or not."""
    folder = write_model(tmp_path / "model", family, weights=True)
    if kind == "fp8":
        by.encode(folder, tmp_path / "values", kind, lambda name: "_proj.weight" in name)
    else:
        in_mxfp4(folder)
    config = json.loads((folder / "config.json").read_text())
    model = trace(ModuleSource(config=config), dtype=dtype, seq_len=64)
    read: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    expected = dict(flat_groups(model, dict(read.named_parameters()) | dict(read.named_buffers())))
    found = dict(read_module_parameters(folder, model))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[group], expected[group]) for group in found)
    whole = dict(loaded_module(folder, dtype, "it").named_parameters())
    assert all(torch.equal(whole[name], one) for name, one in read.named_parameters())
    stored = load_file(folder / "model.safetensors")
    stored["lm_head.weight"] = stored["lm_head.weight"].to(torch.uint8)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"lm_head\.weight in U8, where only BF16, F16, F32"):
        dict(read_module_parameters(folder, model))


def in_mxfp4(folder: Path) -> None:
    stored = dict[str, torch.Tensor]()
    for name, weight in load_file(folder / "model.safetensors").items():
        is_coded = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        stored |= by.mxfp4(name, tuple(weight.shape))[0] if is_coded else {name: weight}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))


def test_a_config_that_names_other_codes_is_refused_before_files_are_looked_into(
    tmp_path: Path,
) -> None:
    save(random_model("llama"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Exception, match="by awq in 4 bits"):
        stored_tensors(tmp_path)
