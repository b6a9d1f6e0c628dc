"""Every family: loss and gradients to the bit, costs as traced; what cannot be is refused."""

import pytest
import torch

from tests.traced.block_by_block import (
    SEQ_LEN,
    block_step,
    chunk_of,
    real_model,
    whole_step,
    wrong_gradients,
)
from tests.traced.families import (
    FAMILIES,
    NOT_TO_THE_BIT,
    REFUSED,
    ROUGH_FLOPS,
    ROUGH_PEAK,
    tiny_config,
)
from twinstream.executor.modules.blocks import ModuleRefusal
from twinstream.executor.modules.module_program import ModuleProgram
from twinstream.executor.modules.tracing import trace
from twinstream.models.providers.traced import ModuleSource, TracedModel


def traced(family: str) -> TracedModel:
    source = ModuleSource(config=tiny_config(family))
    return trace(source, dtype="float32", seq_len=SEQ_LEN)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in REFUSED])
def test_a_family_runs_block_by_block_to_the_bit_and_costs_what_was_traced(family):
    document = traced(family)
    model = real_model(document.source)
    ids, labels = chunk_of(document)
    whole, blocks = (
        whole_step(model, ids, labels),
        block_step(document, model, ids, labels),
    )
    wrong = wrong_gradients(whole, blocks)
    if family in NOT_TO_THE_BIT:
        assert max(wrong.values(), default=0) < 1e-4
    else:
        assert torch.equal(whole.loss, blocks.loss)
        assert not wrong
    room = ROUGH_PEAK.get(family, 0.02)
    off = [
        (what, peak)
        for what, _, peak in blocks.tasks
        if not 0.98 <= peak <= 1 + max(room, 0.05 if what == "prelude" else 0.0)
    ]
    assert not off  # the prelude's may be a little more than it takes
    assert family in ROUGH_FLOPS or all(equal for _, equal, _ in blocks.tasks)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_be_planned_is_refused_with_the_reason(family):
    with pytest.raises(ModuleRefusal, match=REFUSED[family]):
        traced(family)


@pytest.mark.parametrize("key", ["n_layer", "num_hidden_layers"])
def test_a_million_layers_are_refused_before_they_are_built(key):
    family = "gpt2" if key == "n_layer" else "gemma3_text"
    config = {**tiny_config(family), key: 10**6, "layer_types": None}
    with pytest.raises(ModuleRefusal, match="1,000,000; it is from 1 to 10,000"):
        trace(ModuleSource(config=config), dtype="float32", seq_len=SEQ_LEN)


@pytest.mark.filterwarnings("ignore")
def test_a_document_is_read_as_it_was_written_and_buffers_are_the_models_own(tmp_path):
    document = traced("gemma3_text")
    document.save(tmp_path / "model.json")
    assert TracedModel.load(tmp_path / "model.json") == document
    assert TracedModel.load(tmp_path / "model.json").content_hash == document.content_hash
    buffers = ModuleProgram(document).buffers
    real = dict(real_model(document.source).named_buffers())
    assert buffers.keys() == real.keys() and real
    assert all(torch.equal(buffers[name], real[name]) for name in real)
