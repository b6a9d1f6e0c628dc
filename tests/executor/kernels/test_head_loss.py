import pytest
import torch

from tests.executor.kernels.driver import buffer, run, step_state_with
from twinstream.executor.kernels.embedding import head_layout_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# bf16: the logits and their gradients are rounded to 2**-9 relative, sums of them to the same.
TOLERANCES = {"float32": 5e-6, "bfloat16": 1.5e-2}


class Head:
    """One call on random operands."""

    def __init__(
        self, *, dtype="float32", tokens=23, d_model=10, vocab=31, row_slice=5, tied=False
    ):
        self.attributes = {
            "d_model": d_model,
            "vocab_size": vocab,
            "dtype": dtype,
            "num_tokens": tokens,
            "norm_eps": 1e-5,
            "tied": tied,
            "row_slice": row_slice,
        }
        generator = torch.Generator().manual_seed(0)

        def randn(*shape):
            return torch.randn(shape, generator=generator).to(DTYPES[dtype])

        self.hidden, self.weight, self.norm = (
            randn(tokens, d_model),
            randn(vocab, d_model),
            1 + 0.2 * randn(d_model),
        )
        self.labels = torch.randint(0, vocab, (tokens,), generator=generator, dtype=torch.int32)
        self.labels[0], self.labels[tokens // 3] = -1, -100
        self.mode, self.written = "write", {}

    def run(self, fill=0xFF):
        """Call the kernel; a second call adds to what the first has written."""
        run("head_loss", self.attributes, self.operands(), fill)
        self.mode = "update"
        return self

    def operands(self):
        """Of the next call."""
        dtype = self.hidden.dtype
        layout = head_layout_of(self.attributes)
        parameters = buffer(layout.size_bytes, 0)
        by_name = {"final_norm": self.norm, "head": self.weight}
        for tensor in layout.tensors:
            inner = parameters[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes]
            inner.copy_(by_name[tensor.name].flatten().view(torch.uint8))
        ids = torch.full_like(self.labels, -12345)
        if self.mode == "write":
            self.written = {
                "gradients": buffer(layout.size_bytes),
                "loss": buffer(4),
                "d_hidden": buffer(self.hidden.numel() * dtype.itemsize),
            }
        operands = {
            "parameters": (parameters, "read"),
            "hidden": (self.hidden.flatten().view(torch.uint8), "read"),
            "tokens": (torch.cat((ids, self.labels)).view(torch.uint8), "read"),
            "d_hidden": (self.written["d_hidden"], "write"),
            "gradients": (self.written["gradients"], self.mode),
            "loss": (self.written["loss"], self.mode),
            "step_state": (step_state_with(0.125), "read"),
        }
        if self.attributes["tied"]:
            size_bytes = self.weight.numel() * dtype.itemsize
            self.written.setdefault("embedding_gradients", buffer(size_bytes))
            operands["embedding"] = (self.weight.flatten().view(torch.uint8), "read")
            operands["embedding_gradients"] = (self.written["embedding_gradients"], self.mode)
        return operands

    def results(self):
        dtype, layout = self.hidden.dtype, head_layout_of(self.attributes)
        size_bytes = self.weight.numel() * dtype.itemsize
        if self.attributes["tied"]:
            d_weight = self.written["embedding_gradients"]
        else:
            offset_bytes = layout.tensor("head").offset_bytes
            d_weight = self.written["gradients"][offset_bytes : offset_bytes + size_bytes]
        d_norm = self.written["gradients"][: self.norm.numel() * dtype.itemsize]
        return {
            "loss": self.written["loss"].view(torch.float32),
            "d_hidden": self.written["d_hidden"].view(dtype).view(self.hidden.shape),
            "d_norm": d_norm.view(dtype),
            "d_weight": d_weight.view(dtype).view(self.weight.shape),
        }

    def oracle(self):
        hidden, weight, norm = (
            x.double().requires_grad_() for x in (self.hidden, self.weight, self.norm)
        )
        normed = hidden * (hidden.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm
        losses = torch.log_softmax(normed @ weight.t(), -1)
        valid = (self.labels >= 0).nonzero().flatten()
        loss = -0.125 * losses[valid, self.labels[valid].long()].sum()
        loss.backward()
        gradients = {"d_hidden": hidden.grad, "d_norm": norm.grad, "d_weight": weight.grad}
        return {"loss": loss.detach(), **gradients}


def assert_close(actual, expected, tolerance, factors):
    for name, value in expected.items():
        error = (actual[name].double() - factors.get(name, 1) * value).abs().max()
        assert error <= tolerance * factors.get(name, 1) * value.abs().max(), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_agree_with_float64_and_accumulate(dtype, tied):
    head = Head(dtype=dtype, tied=tied)
    expected = head.oracle()
    assert_close(head.run().results(), expected, TOLERANCES[dtype], {})
    twice = {"loss": 2, "d_norm": 2, "d_weight": 2}
    assert_close(head.run().results(), expected, TOLERANCES[dtype], twice)


@pytest.mark.parametrize("row_slice", [1, 4, 23, 1000])
def test_row_slices_change_the_order_of_sums_only(row_slice):
    head = Head(row_slice=row_slice)
    assert_close(head.run().results(), head.oracle(), TOLERANCES["float32"], {})


def test_without_labels_loss_and_gradients_are_zero():
    head = Head()
    head.labels.fill_(-100)
    for value in head.run().results().values():
        assert not value.any()


def test_large_logits_do_not_overflow():
    head = Head()
    head.weight.mul_(1000)
    assert_close(head.run().results(), head.oracle(), 1e-4, {})
