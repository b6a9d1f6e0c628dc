"""DPO of models that run by their own code: the formula by autograd, the same bits after a stop."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from tests.traced.test_trained import write_model
from tests.training.small_runs import options, same_bits_after_a_stop, trained
from tests.training.test_dpo import LN_2, write_pairs
from twinstream.schedule.errors import TwinstreamError
from twinstream.training.trainer import Trainer


@pytest.mark.parametrize("family", ["gemma3_text", "phi3"])
def test_a_run_of_another_family_goes_on_to_the_same_bits(tmp_path: Path, family: str) -> None:
    model = str(write_model(tmp_path / "model", family, weights=True))
    pairs = (str(write_pairs(tmp_path / "pairs.jsonl")),)
    again = {"policy": "streaming", "host_mem": "1GiB"}
    same_bits_after_a_stop(tmp_path, again, model=model, data=pairs, loss="dpo")


def test_a_step_is_that_of_the_formula_by_autograd(tmp_path: Path) -> None:
    """Of the whole module, sequence by sequence; by SGD, whose step is the gradient."""
    folder = write_model(tmp_path / "model", "gemma3_text", weights=True)
    pairs = (str(write_pairs(tmp_path / "pairs.jsonl")),)
    wanted = options(
        tmp_path, model=str(folder), data=pairs, loss="dpo,beta=0.5,label_smoothing=0.1", steps=1,
        optim="sgd", beta1=0.0, weight_decay=0.0, max_grad_norm=0.0, learning_rate=0.1,
        decay="constant", warmup="0", eval_data=pairs,
    )  # fmt: skip
    prepared = Trainer(wanted).prepare()
    with prepared.plan.chunks(prepared.data, wanted.seed) as stream:
        chunks = [next(stream) for _ in range(prepared.plan.chunks_per_step)]
    result, seen = trained(wanted)
    assert seen.losses[0] == pytest.approx(LN_2, abs=1e-7)
    before, after = (AutoModelForCausalLM.from_pretrained(f) for f in (folder, result.model))
    count = sum(chunk.num_pairs for chunk in chunks)
    total = torch.zeros((), dtype=torch.float64)
    for chunk in chunks:
        sums = []
        for place in chunk.documents:
            ids = torch.from_numpy(chunk.ids[place]).long()[None]
            labels = torch.from_numpy(chunk.labels[place]).long()
            rows = torch.log_softmax(before(input_ids=ids).logits[0].double(), -1)
            found = rows.gather(1, labels.clamp(min=0)[:, None])[:, 0]
            sums.append(torch.where(labels >= 0, found, 0.0).sum())
        for chosen, rejected in zip(sums[::2], sums[1::2], strict=True):
            gain = 0.5 * ((chosen - chosen.detach()) - (rejected - rejected.detach()))
            total = total - (0.9 * logsigmoid(gain) + 0.1 * logsigmoid(-gain)) / count
    total.backward()
    for (name, one), other in zip(before.named_parameters(), after.parameters(), strict=True):
        assert one.grad is not None
        step = (one.detach() - other.detach()) / 0.1
        error = (step - one.grad).abs().max() / one.grad.abs().max()
        assert error < 1e-4, name  # the difference of two parameters in float32
    assert np.isfinite(seen.evals[-1].preference.margin)


def test_documents_that_see_each_other_are_refused(tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "model", "qwen3_5_text", weights=True))
    pairs = (str(write_pairs(tmp_path / "pairs.jsonl")),)
    with pytest.raises(TwinstreamError, match="does not keep packed documents apart"):
        trained(options(tmp_path, model=model, data=pairs, loss="dpo"))
