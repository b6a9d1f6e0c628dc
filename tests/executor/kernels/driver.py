"""Calls kernels one by one on buffers of its own, in the order of a training step.

All that a kernel writes or uses as scratch is filled with a byte first, 0xFF (NaN) unless a test
says otherwise, and scratch has exactly the size that the formula says.
"""

from dataclasses import dataclass, field

import torch

from tests.helpers.hf_weights import flat_layouts
from twinstream.executor.kernels.operand import KernelOperand
from twinstream.executor.kernels.registry import registered_kernel
from twinstream.models.demand.workspace import workspace_bytes
from twinstream.models.rope import ROPE_SCALING, RopeScaling
from twinstream.models.spec import ModelSpec

POISON = 0xFF


LLAMA_3_1 = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)


def buffer(size_bytes: int, fill: int = POISON) -> torch.Tensor:
    """Bytes that start at a multiple of 256, as in an arena."""
    raw = torch.full((size_bytes + 256,), fill, dtype=torch.uint8)
    start = -raw.data_ptr() % 256
    return raw[start : start + size_bytes]


def run(
    kernel: str, attributes: dict, operands: dict, fill: int = POISON, vector: str = "eager"
) -> None:
    """Call a kernel; operands are (bytes, mode) by name, without scratch."""
    key = f"{kernel}/{vector}"
    operands = {name: KernelOperand(*operand) for name, operand in operands.items()}
    for operand in operands.values():
        if operand.mode == "write":
            operand.bytes.fill_(fill)
    if size_bytes := workspace_bytes(key, attributes):
        operands["scratch"] = KernelOperand(buffer(size_bytes, fill), "scratch")
    with torch.no_grad():
        registered_kernel(key)(operands, attributes)


def block_attributes(spec: ModelSpec, num_tokens: int, seq_len: int, chunk_start: int) -> dict:
    names = (
        "d_model num_heads num_kv_heads head_dim d_ff qk_norm qkv_bias norm_eps rope_theta dtype"
    )
    return {
        **{name: getattr(spec, name) for name in names.split()},
        **{f"{ROPE_SCALING}{name}": value for name, value in spec.rope_scaling or ()},
        "num_tokens": num_tokens,
        "seq_len": seq_len,
        "chunk_start": chunk_start,
        "attention": "eager",
    }


@dataclass
class Step:
    """Forward and backward of `tokens` [2, all tokens] in chunks; gradients accumulate.

    A chunk packs sequences of `lengths` where they are unequal, and `seq_len` is the longest.
    `recompute` is the level that backward starts from: "FULL", "ATTENTION" or "INPUT".
    """

    spec: ModelSpec
    parameters: dict[str, torch.Tensor]
    tokens: torch.Tensor
    chunk_tokens: int
    seq_len: int
    loss_scale: float
    recompute: str = "FULL"
    row_slice: int = 7
    fill: int = POISON
    vector: str = "eager"
    device: str = "cpu"
    gradient_dtype: str = ""
    lengths: tuple[int, ...] = ()
    saved: dict[tuple[int, int], dict[str, torch.Tensor]] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_chunks = self.tokens.shape[1] // self.chunk_tokens
        self.sliced = self.chunk_tokens < self.seq_len
        self.by_width = self.chunk_tokens * self.spec.d_model * self.spec.itemsize
        self.layouts = flat_layouts(self.spec)
        self.parameters = {name: flat.to(self.device) for name, flat in self.parameters.items()}
        self.tokens = self.tokens.to(self.device)
        self.wider = 2 if self.gradient_dtype == "float32" != self.spec.dtype else 1
        self.written: set[str] = set()

    def run(self) -> torch.Tensor:
        """Return the loss; gradients and what was saved stay on the object."""
        with torch.device(self.device):
            return self._run()

    def _run(self) -> torch.Tensor:
        self.gradients = {
            name: buffer(self.wider * layout.size_bytes) for name, layout in self.layouts.items()
        }
        self.loss = buffer(4)
        self.written.clear()
        hidden = [self._embed(chunk) for chunk in range(self.num_chunks)]
        for layer in range(self.spec.num_layers):
            seen = self._kv_buffers(self.spec.itemsize)
            hidden = [self._forward(layer, c, hidden[c], seen) for c in range(self.num_chunks)]
        d_hidden = {c: self._head(c, hidden[c]) for c in reversed(range(self.num_chunks))}
        for layer in reversed(range(self.spec.num_layers)):
            d_seen = self._kv_buffers(4)
            for chunk in reversed(range(self.num_chunks)):
                self._backward(layer, chunk, d_hidden[chunk], d_seen)
        for chunk in reversed(range(self.num_chunks)):
            operands = {
                "tokens": (self._tokens(chunk), "read"),
                "d_hidden": (d_hidden[chunk], "read"),
                "gradients": self._accumulate("embedding"),
            }
            run("embed_backward", self._end_attributes(), operands, self.fill, self.vector)
        self.d_hidden = d_hidden
        return self.loss.view(torch.float32)

    def _embed(self, chunk: int) -> torch.Tensor:
        output = buffer(self.by_width)
        operands = {
            "parameters": (self.parameters["embedding"], "read"),
            "tokens": (self._tokens(chunk), "read"),
            "output": (output, "write"),
        }
        run("embed_forward", self._end_attributes(), operands, self.fill, self.vector)
        return output

    def _forward(
        self, layer: int, chunk: int, hidden: torch.Tensor, seen: list[torch.Tensor]
    ) -> torch.Tensor:
        spec, tokens = self.spec, self.chunk_tokens
        saved = {
            "hidden": hidden,
            "norms": buffer(8 * tokens),
            "attention": buffer(tokens * (spec.d_q * spec.itemsize + 4 * spec.num_heads)),
            "projections": buffer(
                tokens * (spec.d_q + spec.d_model + 2 * spec.d_ff) * spec.itemsize
            ),
            **self._context(chunk, seen, 2 * spec.d_kv * spec.itemsize),
        }
        self.saved[layer, chunk] = saved
        output = buffer(self.by_width)
        operands = {
            **self._modes(layer, saved, write=("norms", "kv", "attention", "projections")),
            "output": (output, "write"),
        }
        run("block_forward", self._block_attributes(chunk), operands, self.fill, self.vector)
        return output

    def _head(self, chunk: int, hidden: torch.Tensor) -> torch.Tensor:
        d_hidden = buffer(self.by_width)
        operands = {
            "parameters": (self.parameters["head"], "read"),
            "hidden": (hidden, "read"),
            "tokens": (self._tokens(chunk), "read"),
            "d_hidden": (d_hidden, "write"),
            "gradients": self._accumulate("head"),
            "loss": (self.loss, self._mode("loss")),
        }
        if self.spec.tied_embeddings:
            operands["embedding"] = (self.parameters["embedding"], "read")
            operands["embedding_gradients"] = self._accumulate("embedding")
        attributes = self._end_attributes() | {
            "norm_eps": self.spec.norm_eps,
            "tied": self.spec.tied_embeddings,
            "loss_scale": self.loss_scale,
            "row_slice": self.row_slice,
        }
        run("head_loss", attributes, operands, self.fill, self.vector)
        return d_hidden

    def _backward(
        self, layer: int, chunk: int, d_hidden: torch.Tensor, d_seen: list[torch.Tensor]
    ) -> None:
        saved, attributes = self.saved[layer, chunk], self._block_attributes(chunk)
        self._recompute(layer, saved, attributes)
        operands = {
            **self._modes(layer, saved, write=()),
            "d_hidden": (d_hidden, "update"),
            "gradients": self._accumulate(f"layer.{layer}"),
        }
        if self.sliced:
            sequence, position = divmod(chunk, self.seq_len // self.chunk_tokens)
            end = (position + 1) * self.chunk_tokens * 2 * self.spec.d_kv * 4
            mode = self._mode(f"d_context.{layer}.{sequence}")
            operands["d_context"] = (d_seen[sequence][:end], mode)
        run("block_backward", attributes, operands, self.fill, self.vector)

    def _recompute(self, layer: int, saved: dict, attributes: dict) -> None:
        if self.recompute == "FULL":
            return
        again = ("projections",) if self.recompute == "ATTENTION" else ("attention", "projections")
        operands = self._modes(layer, saved, write=again)
        for name in ("kv", "context") if self.recompute == "ATTENTION" else ():
            operands.pop(name, None)
        run(
            f"block_recompute_{self.recompute.lower()}",
            attributes,
            operands,
            self.fill,
            self.vector,
        )

    def _modes(self, layer: int, saved: dict, write: tuple[str, ...]) -> dict:
        modes = {name: "write" if name in write else "read" for name in saved}
        operands = {name: (saved[name], modes[name]) for name in saved}
        return {"parameters": (self.parameters[f"layer.{layer}"], "read"), **operands}

    def _kv_buffers(self, itemsize: int) -> list[torch.Tensor]:
        """One for all K and V of each sequence, or of each chunk of packed sequences."""
        tokens = max(self.seq_len, self.chunk_tokens)
        size_bytes = tokens * 2 * self.spec.d_kv * itemsize
        return [buffer(size_bytes) for _ in range(self.tokens.shape[1] // tokens)]

    def _context(self, chunk: int, seen: list[torch.Tensor], row_bytes: int) -> dict:
        sequence, position = divmod(chunk, max(1, self.seq_len // self.chunk_tokens))
        start = position * self.chunk_tokens * row_bytes
        kv = seen[sequence][start : start + self.chunk_tokens * row_bytes]
        return {"kv": kv, "context": seen[sequence][:start]} if start else {"kv": kv}

    def _accumulate(self, name: str) -> tuple[torch.Tensor, str]:
        return self.gradients[name], self._mode(name)

    def _mode(self, name: str) -> str:
        first = name not in self.written
        self.written.add(name)
        return "write" if first else "update"

    def _tokens(self, chunk: int) -> torch.Tensor:
        columns = slice(chunk * self.chunk_tokens, (chunk + 1) * self.chunk_tokens)
        return self.tokens[:, columns].to(torch.int32).contiguous().view(-1).view(torch.uint8)

    def _block_attributes(self, chunk: int) -> dict:
        start = 0 if self.lengths else chunk * self.chunk_tokens % self.seq_len
        attributes = block_attributes(self.spec, self.chunk_tokens, self.seq_len, start)
        if self.lengths:
            attributes["sequence_lengths"] = self.lengths
        return attributes | self._gradient_attribute()

    def _gradient_attribute(self) -> dict:
        return {"gradient_dtype": self.gradient_dtype} if self.gradient_dtype else {}

    def _end_attributes(self) -> dict:
        spec = self.spec
        return {
            "d_model": spec.d_model,
            "vocab_size": spec.vocab_size,
            "dtype": spec.dtype,
            "num_tokens": self.chunk_tokens,
            **self._gradient_attribute(),
        }
