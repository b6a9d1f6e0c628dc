"""Runs that train adapters, or a part of a model, and leave the rest as it is."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.executor.weights.small_models import logits, random_model, save
from tests.training.small_runs import options, state_files, trained, write_rows
from twinstream.executor.weights.merging import export_adapter
from twinstream.schedule.errors import TwinstreamError
from twinstream.training.options import TrainOptions


def with_lora(folder: Path, **more: object) -> TrainOptions:
    base = folder / "base"
    if not base.exists():
        save(random_model("llama", torch.float32), base)
    rows = write_rows(folder / "rows.jsonl").read_text().upper().replace('"TEXT"', '"text"')
    (folder / "rows.jsonl").write_text(rows)  # in a vocabulary of 97
    given = {"model": str(base), "data": (str(folder / "rows.jsonl"),), "lora": "r=4"}
    return options(folder, **(given | more))


def adapters(folder: Path, step: int) -> dict[str, bytes]:
    checkpoint = folder / f"checkpoint-{step}"
    paths = [checkpoint / "adapter_model.safetensors", *(checkpoint / "optimizer").iterdir()]
    return {path.name: path.read_bytes() for path in paths}


def test_adapters_learn_beside_a_base_that_stays(tmp_path: Path) -> None:
    wanted = with_lora(tmp_path, steps=10)
    before = (tmp_path / "base" / "model.safetensors").read_bytes()
    result, seen = trained(wanted)
    assert seen.losses[-1] < seen.losses[0]
    assert (tmp_path / "base" / "model.safetensors").read_bytes() == before
    assert result.model is not None
    names = sorted(path.name for path in result.model.iterdir())
    assert names == [
        "adapter_config.json", "adapter_model.safetensors", "generation_config.json",
    ]  # fmt: skip
    assert not list(result.folder.rglob("model.safetensors"))  # the base is copied nowhere
    assert result.predicted.device_peak_bytes > 0


def test_a_run_with_adapters_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    whole, straight = trained(with_lora(tmp_path / "a", dtype="bfloat16"))
    wanted = with_lora(tmp_path / "b", dtype="bfloat16")
    stopped, before = trained(wanted, stop_after=3)
    result, after = trained(wanted.model_copy(update={"policy": "streaming"}), resume=True)
    assert before.losses[: stopped.step] + after.losses == straight.losses
    assert adapters(result.folder, 6) == adapters(whole.folder, 6)


def test_what_is_trained_is_what_is_exported(tmp_path: Path) -> None:
    """The merged model has the loss of the evaluation, by transformers."""
    from transformers import AutoModelForCausalLM

    from tests.training.test_trainer import loss_by_transformers

    held_out = write_rows(tmp_path / "held_out.jsonl", 9).read_text().upper()
    (tmp_path / "held_out.jsonl").write_text(held_out.replace('"TEXT"', '"text"'))
    result, seen = trained(with_lora(tmp_path, eval_data=(str(tmp_path / "held_out.jsonl"),)))
    assert result.model is not None
    export_adapter(result.model, tmp_path / "merged", None, merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not torch.equal(logits(merged), logits(random_model("llama", torch.float32)))
    texts = [
        line.split('"text": "')[1][:-2]
        for line in held_out.replace('"TEXT"', '"text"').splitlines()
    ]
    expected = loss_by_transformers(tmp_path / "merged", texts)
    assert seen.evals[-1].loss == pytest.approx(expected, abs=1e-4)


def test_an_adapter_is_gone_on_with_as_new_weights(tmp_path: Path) -> None:
    first, seen = trained(with_lora(tmp_path))
    _, after = trained(
        with_lora(tmp_path, output=tmp_path / "more", adapter=first.model, lora=None)
    )
    assert after.losses[0] < seen.losses[0] - 0.05
    with pytest.raises(TwinstreamError, match="leave out --lora"):
        trained(with_lora(tmp_path, output=tmp_path / "x", adapter=first.model, lora="r=8"))


def test_frozen_layers_stay_as_they_are(tmp_path: Path) -> None:
    wanted = with_lora(tmp_path, lora=None, freeze=("model.layers.0.*", "model.embed_tokens.*"))
    result, _ = trained(wanted)
    before = load_file(tmp_path / "base" / "model.safetensors")
    assert result.model is not None
    after = load_file(result.model / "model.safetensors")
    same = {name for name, values in before.items() if torch.equal(values, after[name])}
    assert same == {n for n in before if n.startswith(("model.layers.0.", "model.embed"))}
    names = set(state_files(result.folder, 6))
    assert "opt.0.bin" not in names and "opt.1.bin" in names


def test_what_cannot_be_is_one_message(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj"])
    get_peft_model(random_model("llama", torch.float32), config).save_pretrained(tmp_path / "a")
    for more, message in (
        ({"lora": "r=0"}, "r"),
        ({"lora": "r=4,targets=x"}, "x"),
        ({"freeze": ("*",), "lora": None}, "nothing is left"),
        ({"freeze": ("model.layers.0.mlp.*",), "lora": None}, "only in part"),
        ({"freeze": ("model.layers.0.*",)}, "leave out --freeze"),
        ({"adapter": tmp_path / "none", "lora": None}, "adapter_config.json"),
        ({"adapter": tmp_path / "a", "lora": None, "freeze": ("*",)}, "leave out --freeze"),
        ({"model": str(tmp_path / "a")}, "give its base, and .* --adapter"),
    ):
        with pytest.raises(TwinstreamError, match=message):
            trained(with_lora(tmp_path, **more))
