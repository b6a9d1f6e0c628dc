"""Runs that train adapters beside a base in few bits."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.front_door.command_line import call
from tests.training.ranks.rank_runs import rank_options
from tests.training.small_runs import trained
from tests.training.test_adapters import adapters, with_lora
from twinstream.executor.kernels.base_codes import levels, quantize, write_dequantized
from twinstream.executor.weights.hf_folder import HfFolder
from twinstream.executor.weights.merging import export_adapter
from twinstream.executor.weights.peft.peft_folder import BASE
from twinstream.schedule.errors import TwinstreamError


def test_a_run_goes_on_to_the_same_bits_under_another_policy(tmp_path: Path) -> None:
    whole, straight = trained(with_lora(tmp_path / "a", dtype="bfloat16", base="nf4"))
    wanted = with_lora(tmp_path / "b", dtype="bfloat16", base="nf4")
    stopped, before = trained(wanted, stop_after=3)
    result, after = trained(wanted.model_copy(update={"policy": "streaming"}), resume=True)
    assert before.losses[: stopped.step] + after.losses == straight.losses
    assert adapters(result.folder, 6) == adapters(whole.folder, 6)
    assert straight.losses[-1] < straight.losses[0]


def test_a_run_goes_on_with_the_base_that_it_began_with(tmp_path: Path) -> None:
    wanted = with_lora(tmp_path, base="nf4")
    trained(wanted, stop_after=3)
    with pytest.raises(TwinstreamError, match="base"):
        trained(wanted.model_copy(update={"base": "8bit"}), resume=True)


def test_an_adapter_is_gone_on_with_beside_a_base_in_few_bits(tmp_path: Path) -> None:
    """With the rank and targets of its folder, to the bits of a run that is told them."""
    lora, few = "r=3,alpha=5,rslora,targets=q,down", {"base": "nf4", "steps": 2}
    first, before = trained(with_lora(tmp_path, lora=lora, **few))
    more = with_lora(tmp_path, adapter=first.model, lora=None, output=tmp_path / "more", **few)
    stopped, some = trained(more, stop_after=1)
    result, rest = trained(more.model_copy(update={"policy": "streaming"}), resume=True)
    whole, straight = trained(more.model_copy(update={"lora": lora, "output": tmp_path / "told"}))
    assert some.losses[: stopped.step] + rest.losses == straight.losses
    assert straight.losses[0] < before.losses[0] - 0.05
    assert adapters(result.folder, 2) == adapters(whole.folder, 2)


def test_merging_says_what_few_bits_cost(tmp_path: Path) -> None:
    result, _ = trained(with_lora(tmp_path, base="nf4"))
    assert result.model is not None
    told = call("export", result.model, "-o", tmp_path / "merged", "--merge")
    assert told.code == 0, told.err
    text = " ".join(told.out.split())
    share = float(text.split("off by ")[1].split("%")[0])
    assert "beside a base in nf4" in text and 8 < share < 11, text
    export_adapter(result.model, tmp_path / "copied", None, merge=False)
    assert (tmp_path / "copied" / BASE).read_text() == '{"base": "nf4"}'
    (tmp_path / "copied" / BASE).write_text("{")
    with pytest.raises(TwinstreamError, match="does not say how the base was"):
        export_adapter(tmp_path / "copied", tmp_path / "more", tmp_path / "base", merge=True)


def in_nf4(folder: Path, to: Path, *, double: bool) -> dict[str, torch.Tensor]:
    """A folder as bitsandbytes stores it; the values that its codes stand for."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
    }  # fmt: skip
    (to / "config.json").write_text(json.dumps(config))
    stored, values = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, weight in load_file(folder / "model.safetensors").items():
        if ".layers." not in name or weight.dim() < 2:
            stored[name] = weight
            continue
        codes = torch.empty(weight.numel() // 2, dtype=torch.uint8)
        scales = torch.empty(weight.numel() // 64)
        quantize(weight, codes, scales, "nf4")
        told = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [*weight.shape]}
        stored |= {name: codes[:, None], f"{name}.quant_map": levels("nf4", codes.device)}
        if double:
            levels_256 = torch.linspace(-1, 1, 256)
            offset = float(scales.mean())
            nested = torch.stack([(s - offset).abs().max() for s in scales.split(256)])
            share = (scales - offset) / nested.repeat_interleave(256)[: len(scales)]
            nearest = (share[:, None] - levels_256).abs().argmin(1).to(torch.uint8)
            stored |= {
                f"{name}.absmax": nearest, f"{name}.nested_absmax": nested,
                f"{name}.nested_quant_map": levels_256,
            }  # fmt: skip
            told |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            by_block = nested.repeat_interleave(256)[: len(scales)]
            scales = levels_256[nearest.long()] * by_block + offset
        else:
            stored[f"{name}.absmax"] = scales
        text = json.dumps(told).encode()
        stored[f"{name}.quant_state.bitsandbytes__nf4"] = torch.tensor([*text], dtype=torch.uint8)
        values[name] = torch.empty_like(weight)
        write_dequantized(codes, scales, values[name], levels("nf4", codes.device))
    save_file(stored, to / "model.safetensors", metadata={"format": "pt"})
    return values


@pytest.mark.parametrize("double", [False, True])
def test_a_base_that_bitsandbytes_stored_is_read(tmp_path: Path, *, double: bool) -> None:
    """Its codes as they are, or their values; its neighbours stay."""
    plain = with_lora(tmp_path / "x")
    values = in_nf4(Path(plain.model), tmp_path / "few", double=double)
    folder = tmp_path / "same"
    shutil.copytree(plain.model, folder)
    whole = load_file(folder / "model.safetensors") | values
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    losses = {}
    for model in (folder, tmp_path / "few"):
        for base in ("nf4", "model"):
            out = tmp_path / f"{model.name}-{base}"
            _, seen = trained(with_lora(tmp_path / "x", output=out, model=str(model), base=base))
            losses[model.name, base] = seen.losses
    assert losses["few", "nf4"] == losses["few", "model"] == losses["same", "model"]
    file = tmp_path / "few" / "model.safetensors"
    stored = load_file(file)
    at = next(name for name in stored if name.endswith(".absmax"))
    save_file({n: t for n, t in stored.items() if n != at}, file, metadata={"format": "pt"})
    with pytest.raises(TwinstreamError, match="with no absmax; fetch"):
        trained(with_lora(tmp_path / "x", output=tmp_path / "o", model=str(tmp_path / "few")))


def test_a_base_is_made_once_and_anew_where_its_source_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = with_lora(tmp_path, base="nf4", steps=22)
    made: list[str] = []
    read = HfFolder.read_group

    def seen(folder: HfFolder, group: str, flat: torch.Tensor) -> None:
        made.append(group)
        read(folder, group, flat)

    monkeypatch.setattr(HfFolder, "read_group", seen)
    trained(wanted, stop_after=3)
    assert made == ["embedding", "0", "1", "head"]
    trained(wanted, stop_after=6, resume=True)
    assert made[4:] == ["embedding", "head"]
    kept = wanted.output / "base"
    block = kept / "0.bin"
    whole = block.read_bytes()
    block.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    trained(wanted, stop_after=10, resume=True)
    assert made[6:] == ["embedding", "0", "head"] and block.read_bytes() == whole
    trained(wanted, stop_after=14, resume=True)
    assert made[9:] == ["embedding", "head"]
    file = tmp_path / "base" / "model.safetensors"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    trained(wanted, stop_after=18, resume=True)  # which has the same bytes
    assert made[11:] == ["embedding", "head"]
    content, was = file.read_bytes(), file.stat()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))  # of the size and time that it had
    trained(wanted, resume=True)
    assert made[13:] == ["embedding", "0", "1", "head"]
    assert sorted(path.name for path in kept.iterdir()) == ["0.bin", "1.bin", "made_of.json"]


def test_what_a_run_writes_whole_is_not_kept_in_few_bits(tmp_path: Path) -> None:
    wanted = with_lora(tmp_path, lora=None, freeze=("model.layers.0.*",), base="nf4")
    with pytest.raises(TwinstreamError, match="train adapters beside it"):
        trained(wanted)


@pytest.mark.parametrize("layout", [{"pp": 2}, {"dp": 2, "zero": 3}])
def test_ranks_have_the_losses_of_one_device(tmp_path: Path, layout: dict[str, int]) -> None:
    how = {"lora": "r=4", "base": "nf4"}
    _, alone = trained(rank_options(tmp_path / "one", **how))
    _, seen = trained(rank_options(tmp_path / "two", ranks=2, **layout, **how))
    if "pp" in layout:
        assert seen.losses == alone.losses
    assert seen.losses == pytest.approx(alone.losses, abs=1e-5)
