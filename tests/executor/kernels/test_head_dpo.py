"""DPO's head against the formula in autograd, in float64."""

import pytest
import torch
from torch.nn.functional import logsigmoid

from tests.executor.kernels import driver
from tests.executor.kernels.driver import buffer, run
from tests.executor.kernels.test_head_loss import DTYPES, TOLERANCES, Head, assert_close
from twinstream.executor.kernels.workspace import WorkspaceExhaustedError
from twinstream.executor.run.training import sequences_tensor
from twinstream.models.kernel_costs.workspace import workspace_bytes
from twinstream.models.layout import ALIGNMENT_BYTES

LENGTHS = (4, 3, 5, 2, 6, 3)  # two pairs, then padding of 6 and 3 tokens
REFERENCE = ((-9.0, -14.0), (-8.0, -5.5))  # of the chosen ones, of the rejected ones
MOST_PAIRS = 4
SCALE = 0.125  # what a pair's loss counts


class Pairs(Head):
    """Two pairs of answers, with room for more; padding has no labels."""

    def __init__(self, *, beta=0.3, label_smoothing=0.0, **options):
        super().__init__(tokens=sum(LENGTHS), **options)
        self.attributes |= {
            "most_pairs": MOST_PAIRS, "beta": beta, "label_smoothing": label_smoothing
        }  # fmt: skip
        self.labels[sum(LENGTHS[:4]) :] = -100
        self.labels[3] = self.labels[6] = -100  # a document's last token has none

    def operands(self):
        reference = torch.zeros(3, MOST_PAIRS)
        reference[:2, :2], reference[2, :2] = torch.tensor(REFERENCE), 1
        if self.mode == "write":
            self.log_probs = buffer(4 * 2 * MOST_PAIRS)
        starts = sequences_tensor(LENGTHS, 2 * MOST_PAIRS + 1)
        return super().operands() | {
            "sequences": (starts.view(torch.uint8), "read"),
            "reference": (reference.view(-1).view(torch.uint8), "read"),
            "log_probs": (self.log_probs, "write"),
        }

    def run(self, fill=0xFF, vector="eager"):
        run("head_dpo", self.attributes, self.operands(), fill, vector)
        self.mode = "update"
        return self

    def oracle(self):
        hidden, weight, norm = (
            x.double().requires_grad_() for x in (self.hidden, self.weight, self.norm)
        )
        normed = hidden * (hidden.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm
        rows = torch.log_softmax(normed @ weight.t(), -1)
        rows = rows.gather(1, self.labels.clamp(min=0).long()[:, None])[:, 0]
        rows = torch.where(self.labels >= 0, rows, 0.0)
        sums = torch.stack([part.sum() for part in rows.split(LENGTHS)[:4]])
        chosen, rejected = torch.tensor(REFERENCE, dtype=torch.float64)
        margins = self.attributes["beta"] * ((sums[::2] - chosen) - (sums[1::2] - rejected))
        smoothing = self.attributes["label_smoothing"]
        losses = -logsigmoid(margins) * (1 - smoothing) - logsigmoid(-margins) * smoothing
        loss = SCALE * losses.sum()
        loss.backward()
        gradients = {"d_hidden": hidden.grad, "d_norm": norm.grad, "d_weight": weight.grad}
        return {"loss": loss.detach(), **gradients}, sums.detach()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_loss_and_gradients_are_the_formulas_and_accumulate(dtype, tied, label_smoothing):
    pairs = Pairs(dtype=dtype, tied=tied, label_smoothing=label_smoothing)
    expected, log_probs = pairs.oracle()
    tolerance = {"float32": 1e-6, "bfloat16": 2 * TOLERANCES["bfloat16"]}[dtype]
    assert_close(pairs.run().results(), expected, tolerance, {})
    found = pairs.log_probs.view(torch.float32)
    assert torch.allclose(found[:4].double(), log_probs, rtol=tolerance)
    assert not found[4:].any()
    twice = {"loss": 2, "d_norm": 2, "d_weight": 2}
    assert_close(pairs.run().results(), expected, tolerance, twice)


def test_what_equals_its_reference_has_a_margin_of_nothing():
    pairs = Pairs(beta=0.1).run()
    found = pairs.log_probs.view(torch.float32)[:4]
    operands = pairs.operands()
    reference = operands["reference"][0].view(torch.float32).view(3, MOST_PAIRS)
    reference[0, :2], reference[1, :2] = found[::2], found[1::2]
    loss = operands["loss"][0].view(torch.float32)
    loss.zero_()
    run("head_dpo", pairs.attributes, operands)
    assert loss.item() == torch.tensor(2 * SCALE).mul(torch.tensor(2.0).double().log()).float()


@pytest.mark.parametrize("row_slice", [1, 4, 23])
def test_pairs_may_lie_across_slices_of_rows(row_slice):
    pairs = Pairs(row_slice=row_slice)
    assert_close(pairs.run().results(), pairs.oracle()[0], 2e-6, {})


def test_without_pairs_everything_is_zero():
    pairs = Pairs()
    pairs.labels.fill_(-100)
    operands = pairs.operands()
    operands["reference"][0].zero_()
    run("head_dpo", pairs.attributes, operands)
    assert not any(value.any() for value in pairs.results().values())


def test_a_loss_that_is_no_number_is_seen():
    pairs = Pairs()
    pairs.hidden[0, 0] = float("nan")
    assert pairs.run().results()["loss"].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
def test_alone_and_with_tritons_kernels_the_loss_has_the_same_bits(dtype, triton_device):
    for vector, device in (("eager", "cpu"), ("triton", triton_device)):
        pairs = Pairs(dtype=dtype)
        with torch.device(device):
            operands = {n: (b.to(device), m) for n, (b, m) in pairs.operands().items()}
            alone = {n: o for n, o in operands.items() if "gradients" not in n and n != "d_hidden"}
            alone |= {"loss": (buffer(4), "write"), "log_probs": (buffer(4 * 8), "write")}
            run("head_dpo_evaluate", pairs.attributes, alone, vector=vector)
            run("head_dpo", pairs.attributes, operands, vector=vector)
            for name in ("loss", "log_probs"):
                assert torch.equal(alone[name][0], operands[name][0])
        pairs.written = {name: operands[name][0].cpu() for name in pairs.written}
        assert_close(pairs.results(), pairs.oracle()[0], 2 * TOLERANCES[dtype], {})


@pytest.mark.parametrize("vector", ["eager", "triton"])
@pytest.mark.parametrize("kernel", ["head_dpo", "head_dpo_evaluate"])
def test_its_scratch_is_exact(kernel, vector, monkeypatch):
    if vector == "triton":
        pytest.importorskip("triton")
    pairs = Pairs()
    size = workspace_bytes(f"{kernel}/{vector}", pairs.attributes)
    monkeypatch.setattr(driver, "workspace_bytes", lambda *_: size - ALIGNMENT_BYTES)
    with pytest.raises(WorkspaceExhaustedError):
        run(kernel, pairs.attributes, pairs.operands(), vector=vector)
