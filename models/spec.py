"""The architecture of a dense decoder-only transformer: RMSNorm, RoPE, GQA, SwiGLU."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from twinstream.models.hf_config import Dtype, HfConfigError, describe_problems, read_hf_config
from twinstream.models.rope import PositiveFinite, RopeScaling
from twinstream.schedule.node import Node

Width = Annotated[int, Field(gt=0, le=2**22)]

ITEMSIZE_BYTES = {"bfloat16": 2, "float32": 4}


class ModelSpec(Node):
    """Sizes and options of one model; everything else is derived.

    `qk_norm` is Qwen3's: an RMSNorm with a weight of [head_dim] over each Q and K head before
    RoPE. `qkv_bias` is Qwen2's: a bias on the Q, K and V projections and nowhere else.
    `rope_scaling` is that of Llama 3.1 and later, None plain RoPE. The
    product num_heads * head_dim may differ from d_model.

    >>> from twinstream.models.presets import load_preset
    >>> load_preset("8b").num_parameters
    8030261248
    """

    name: Annotated[str, Field(min_length=1)]
    num_layers: Annotated[int, Field(gt=0, le=2**20)]
    d_model: Width
    num_heads: Width
    num_kv_heads: Width
    head_dim: Width
    d_ff: Width
    vocab_size: Annotated[int, Field(gt=0, le=2**26)]
    norm_eps: PositiveFinite = 1e-5
    rope_theta: PositiveFinite = 500_000.0
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    tied_embeddings: bool = False
    dtype: Dtype = "bfloat16"

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise PydanticCustomError(
                "heads_not_divisible",
                "num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}",
                {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads},
            )
        if self.d_q > 2**22:
            raise PydanticCustomError(
                "too_wide",
                "num_heads * head_dim is {d_q}, more than 2**22",
                {"d_q": self.d_q},
            )
        if self.head_dim % 2:
            raise PydanticCustomError(
                "odd_head_dim",
                "head_dim {head_dim} is odd, RoPE rotates pairs of elements",
                {"head_dim": self.head_dim},
            )
        return self

    @classmethod
    def from_hf_config(
        cls, path: str | Path, *, dtype: Dtype | None = None, longest: int | None = None
    ) -> Self:
        """Read a Hugging Face config.json, or the one in a folder.

        Covers llama, mistral, qwen2 and qwen3. Absent keys mean what they mean to transformers,
        so an absent dtype is float32.

        Args:
            dtype: of parameters, whatever the file says: float16, say.
            longest: tokens of the longest sequence, which a sliding window may be no shorter than;
                without it every window is refused.

        Raises:
            HfConfigError: the file is missing, broken or incomplete.
            UnsupportedConfigError: it asks for a computation that is not supported, or holds an
                unknown key.
        """
        fields = read_hf_config(path, dtype, longest)
        try:
            return cls(**fields)
        except ValidationError as error:
            raise HfConfigError(path=path, problem=describe_problems(error)) from None

    @property
    def d_q(self) -> int:
        """Width of all query heads together, also the input width of the output projection."""
        return self.num_heads * self.head_dim

    @property
    def d_kv(self) -> int:
        """Width of all key heads together; the values are as wide."""
        return self.num_kv_heads * self.head_dim

    @property
    def itemsize(self) -> int:
        """Bytes per element of parameters and activations."""
        return ITEMSIZE_BYTES[self.dtype]

    @property
    def num_block_parameters(self) -> int:
        """Parameters of one block, its two norms included."""
        norms = 2 * self.d_model + (2 * self.head_dim if self.qk_norm else 0)
        d_qkv = self.d_q + 2 * self.d_kv
        bias = d_qkv if self.qkv_bias else 0
        attention = d_qkv * self.d_model + bias + self.d_model * self.d_q
        return norms + attention + 3 * self.d_model * self.d_ff

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; tied embeddings count once."""
        num_vocab_matrices = 1 if self.tied_embeddings else 2
        vocab = num_vocab_matrices * self.vocab_size * self.d_model
        return self.num_layers * self.num_block_parameters + self.d_model + vocab
