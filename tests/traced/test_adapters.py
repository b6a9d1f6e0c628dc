"""LoRA on models of other families: PEFT's numbers, PEFT's files, the same bits after a resume."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.front_door.command_line import call
from tests.traced.test_round_trip import logits_of, more_tensors, whole_folder
from tests.traced.test_trained import write_model
from tests.training.small_runs import (
    options,
    same_bits_after_a_stop,
    state_files,
    trained,
    write_rows,
)
from twinstream.executor.modules.adapters import add_adapters, is_adapter
from twinstream.models.recipes.lora import ModuleLora
from twinstream.schedule.errors import TwinstreamError
from twinstream.tracing import path_notes, trace_model

QV = "r=4,alpha=6,targets=q_proj,v"
IDS = torch.arange(40).view(2, 20)


def loaded(folder: Path, adapters: Path | None = None) -> torch.nn.Module:
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return module if adapters is None else PeftModel.from_pretrained(module, adapters)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "targets", "dropout"),
    [
        ("gemma3_text", ("q_proj", "v_proj"), 0.0),
        ("gpt2", (), 0.0),
        ("qwen3_moe", ("o_proj", "k_proj"), 0.0),
        ("gemma3_text", (), 0.3),
    ],
)
def test_adapters_compute_what_pefts_do(
    tmp_path: Path, family: str, targets: tuple, dropout: float
) -> None:
    folder = write_model(tmp_path / "model", family, weights=True)
    ours, theirs = loaded(folder), loaded(folder)
    lora = ModuleLora(rank=4, alpha=6.0, targets=targets, dropout=dropout)
    add_adapters(ours, lora)
    names = sorted({n.split(".lora_A.")[0] for n, _ in ours.named_parameters() if is_adapter(n)})
    assert len(names) >= 6
    config = LoraConfig(
        r=4, lora_alpha=6, target_modules=names, task_type="CAUSAL_LM", lora_dropout=dropout
    )
    peft = get_peft_model(theirs, config)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if is_adapter(name):
                parameter.normal_(std=0.1)
                place = "base_model.model." + name.replace(".weight", ".default.weight")
                peft.get_parameter(place).copy_(parameter)
    losses = []
    for model in (ours, peft):
        model.train(dropout > 0)
        torch.manual_seed(1)
        losses.append(model(input_ids=IDS, labels=IDS, use_cache=False).loss)
        losses[-1].backward()
    assert torch.equal(*losses)
    assert (ours.eval()(input_ids=IDS, labels=IDS).loss == losses[0]) == (dropout == 0)
    assert torch.equal(ours.eval()(IDS).logits, peft.eval()(IDS).logits)
    for name, parameter in ours.named_parameters():
        if is_adapter(name):
            place = "base_model.model." + name.replace(".weight", ".default.weight")
            assert torch.equal(parameter.grad, peft.get_parameter(place).grad)
        else:
            assert parameter.grad is None


@pytest.mark.filterwarnings("ignore")
def test_adapters_with_dropout_have_the_same_bits_under_every_cap(tmp_path: Path) -> None:
    """Of a family of our kernels, which have no dropout: it runs by its own code, and says so."""
    model = write_model(tmp_path / "model", "llama", weights=True)
    rows = (str(write_rows(tmp_path / "rows.jsonl")),)
    again = {"policy": "streaming", "host_mem": "1GiB"}
    given = {"model": str(model), "data": rows, "lora": "r=4,dropout=0.2,targets=q,v"}
    result = same_bits_after_a_stop(tmp_path, again, **given)
    assert result.model is not None
    config = json.loads((result.model / "adapter_config.json").read_text())
    assert (config["lora_dropout"], config["target_modules"][-1][-6:]) == (0.2, "v_proj")
    losses = [
        trained(options(tmp_path / str(p), **given | {"lora": f"r=4,dropout={p},targets=q,v"}))[1]
        for p in (0, 0.2)
    ]
    assert losses[0].losses != losses[1].losses
    (note,) = path_notes(model, None, 64, given["lora"])
    assert "own kernels have no dropout, which --lora asks for" in note
    for wanted in ({"model": "tiny", "tokenizer": "bytes"}, {"base": "nf4"}):
        with pytest.raises(TwinstreamError, match=r"dropout|own code|its own"):
            trained(options(tmp_path / "refused", **given | wanted))


@pytest.mark.filterwarnings("ignore")
def test_a_run_goes_on_to_the_same_bits_and_peft_loads_it(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "gemma3_text", weights=True)
    rows = (str(write_rows(tmp_path / "rows.jsonl")),)
    again = {"policy": "streaming", "host_mem": "1GiB"}
    given = {"model": str(model), "data": rows, "lora": QV}
    result = same_bits_after_a_stop(tmp_path, again, **given)
    assert result.model is not None
    written = load_file(result.model / "adapter_model.safetensors")
    assert len(written) == 12 and not (result.model / "model.safetensors").exists()
    merged = tmp_path / "merged"
    assert call("export", result.model, "-o", merged, "--merge").code == 0
    with torch.no_grad():
        base, adapted = loaded(model)(IDS).logits, loaded(model, result.model)(IDS).logits
        whole_logits = loaded(merged)(IDS).logits
    assert not torch.allclose(base, adapted)
    torch.testing.assert_close(whole_logits, adapted, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_adapters_of_a_text_part_are_named_as_the_whole_model_has_its_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that PEFT puts them into the class that the folder names, and a merge writes all of it."""
    model = tmp_path / "model"
    whole = whole_folder(model, "gemma3")
    more_tensors(model, {"mtp.proj.weight": torch.rand(3)}, num_mtp_modules=1)
    monkeypatch.setattr(type(whole), "_keys_to_ignore_on_load_unexpected", [r"^mtp"])
    rows = (str(write_rows(tmp_path / "rows.jsonl")),)
    given = {"model": str(model), "data": rows, "lora": QV, "steps": 2, "learning_rate": 0.05}
    result, seen = trained(options(tmp_path / "a", **given))
    assert result.model is not None
    adapted = PeftModel.from_pretrained(type(whole).from_pretrained(model), result.model)
    _, on = trained(options(tmp_path / "b", **given, adapter=result.model))
    assert on.losses[0] < seen.losses[0]
    merged = tmp_path / "merged"
    assert call("export", result.model, "-o", merged, "--merge").code == 0
    back, about = type(whole).from_pretrained(merged, output_loading_info=True)
    assert not about["missing_keys"]
    torch.testing.assert_close(logits_of(back), logits_of(adapted), rtol=1e-5, atol=1e-5)
    assert float((logits_of(whole) - logits_of(adapted)).abs().max()) > 1e-3
    assert "mtp.proj.weight" in (merged / "model.safetensors.index.json").read_text()


def test_the_base_has_no_optimizer_state_and_no_gradient(tmp_path: Path) -> None:
    config = write_model(tmp_path / "model", "gemma3_text", weights=False)
    plan = tmp_path / "plan.json"
    step = ("--seq-len", 64, "--tokens-per-step", 256, "--machine", "cpu")
    call("plan", "--model", config, *step, "--lora", QV, "-o", plan)
    text = plan.read_text()
    assert '"opt.lora.0"' in text and '"opt.0"' not in text and '"grad.0"' not in text
    adapted, whole = (trace_model(config, seq_len=64, lora=lora) for lora in (QV, None))
    flops = [model.kinds[0].backward.flops(1, 64) for model in (adapted, whole)]
    assert flops[0] < 0.8 * flops[1]  # no gradient of the base's weights


@pytest.mark.filterwarnings("ignore")
def test_a_run_begins_with_an_adapter_that_is_given(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "gemma3_text", weights=True)
    rows = (str(write_rows(tmp_path / "rows.jsonl")),)
    given = {"model": str(model), "data": rows, "lora": QV}
    first, straight = trained(options(tmp_path / "a", **given))
    assert first.model is not None
    more = {"adapter": first.model, "steps": 1}
    _, on = trained(options(tmp_path / "b", **given, **more))
    assert on.losses[0] < straight.losses[0]
    wanted = options(tmp_path / "c", **{**given, "lora": None}, **more)
    _, same = trained(wanted)  # its LoRA is that of the folder
    assert same.losses == on.losses
    _, rest = trained(wanted.model_copy(update={"steps": 2}), resume=True)
    assert [step.step for step in rest.steps] == [2]
    with pytest.raises(TwinstreamError, match="alpha=6"):
        other = {**given, "lora": "r=4,alpha=8,targets=q_proj,v"}
        trained(options(tmp_path / "d", **other, **more))


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_of_a_mixture_is_merged_and_another_kind_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "qwen3_moe", weights=True)
    peft = get_peft_model(loaded(model), LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM",
    ))  # fmt: skip
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    adapter, base = tmp_path / "adapter", ("--base", model, "--merge")
    peft.save_pretrained(adapter)
    assert call("export", adapter, "-o", tmp_path / "merged", *base).code == 0
    with torch.no_grad():
        merged, beside = loaded(tmp_path / "merged")(IDS).logits, peft.eval()(IDS).logits
    torch.testing.assert_close(merged, beside, rtol=1e-5, atol=1e-5)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    refused = call("export", adapter, "-o", tmp_path / "other", *base)
    assert refused.code == 2 and "use_dora" in refused.err
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    rows = (str(write_rows(tmp_path / "rows.jsonl")),)
    given = {"model": str(model), "data": rows, "adapter": adapter, "steps": 1}
    with pytest.raises(TwinstreamError, match="leave out --lora"):
        trained(options(tmp_path, lora="r=4,alpha=6,targets=q", **given))


OWN = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.low = nn.LayerNorm(32), nn.Module()
        self.low.lora_A, self.low.lora_B = nn.Linear(32, 4), nn.Linear(4, 32)
        self.norm.weight.requires_grad_(False)

    def forward(self, x):
        return x + self.low.lora_B(self.low.lora_A(self.norm(x)))


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(260, 32), nn.Linear(32, 260)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
"""


@pytest.mark.filterwarnings("ignore")
def test_a_module_with_low_rank_layers_of_its_own_is_trained_whole(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    given = {"model": f"{tmp_path}/own.py:Own", "data": (str(write_rows(tmp_path / "rows.jsonl")),)}
    wanted = options(tmp_path, **given)
    stopped, _ = trained(wanted, stop_after=3)
    trained(wanted, resume=True)
    assert stopped.step < 6 and len(state_files(wanted.output, 6)) == 5
    with pytest.raises(TwinstreamError, match="adapters of its own"):
        trained(options(tmp_path / "b", lora="r=2", **given))


def test_targets_and_documents_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    config = write_model(tmp_path / "model", "gemma3_text", weights=False)
    step = ("--seq-len", 64, "--tokens-per-step", 256, "--machine", "cpu")
    refused = call("plan", "--model", config, *step, "--lora", "r=4,targets=query")
    assert (
        refused.code == 2 and "no linear layer 'query'" in refused.err and "q_proj" in refused.err
    )
    traced = tmp_path / "m.json"
    call("trace", config, "--seq-len", 64, "--lora", QV, "-o", traced)
    assert trace_model(config, seq_len=64, lora=QV).source.lora is not None
    call("plan", "--model", traced, *step, "--lora", QV)
    refused = call("plan", "--model", traced, *step, "--lora", "r=8")
    assert "traced with other adapters" in refused.err
