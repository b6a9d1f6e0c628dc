"""The attributes of a block kernel."""

from dataclasses import dataclass
from functools import cached_property

import torch

from twinstream.executor.kernels.operand import DTYPES
from twinstream.executor.kernels.rope import Rope
from twinstream.models.layout import Layout, block_layout
from twinstream.models.spec import ModelSpec
from twinstream.models.workspace import Attributes, required_attributes, typed_attribute
from twinstream.schedule.errors import TwinstreamError

_SPEC_FIELDS = (
    "d_model",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "d_ff",
    "qk_norm",
    "qkv_bias",
    "norm_eps",
    "rope_theta",
    "dtype",
)


@dataclass(frozen=True)
class BlockCall:
    """Which block it is and where the chunk of `num_tokens` lies in sequences of `seq_len`."""

    spec: ModelSpec
    num_tokens: int
    seq_len: int
    chunk_start: int
    attention: str

    @classmethod
    def from_attributes(cls, attributes: Attributes) -> "BlockCall":
        fields = required_attributes(attributes, *_SPEC_FIELDS)
        # A block depends neither on the depth nor on the vocabulary of its model.
        spec = ModelSpec.model_validate(
            {"name": "block", "num_layers": 1, "vocab_size": 1, **fields}
        )
        call = cls(
            spec=spec,
            num_tokens=typed_attribute(attributes, "num_tokens", int),
            seq_len=typed_attribute(attributes, "seq_len", int),
            chunk_start=typed_attribute(attributes, "chunk_start", int),
            attention=typed_attribute(attributes, "attention", str),
        )
        outside = call.chunk_start + call.num_tokens > call.seq_len
        broken = call.num_tokens % call.seq_len or call.chunk_start
        if outside if call.sliced else broken:
            raise TwinstreamError(
                f"a chunk of {call.num_tokens} tokens at {call.chunk_start} neither packs whole "
                f"sequences of {call.seq_len} tokens nor lies in one"
            )
        return call

    @property
    def sliced(self) -> bool:
        """Whether the chunk is a slice of one sequence, and not a pack of whole ones."""
        return self.num_tokens < self.seq_len

    @property
    def num_sequences(self) -> int:
        return 1 if self.sliced else self.num_tokens // self.seq_len

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.spec.dtype]

    @property
    def rope(self) -> Rope:
        return Rope(self.spec.rope_theta, self.spec.head_dim, self.seq_len, self.chunk_start)

    @cached_property
    def layout(self) -> Layout:
        return block_layout(self.spec)
