"""Embedding lookup and its backward, and the layouts of the flat tensors at both ends.

Legend: T tokens of the chunk, D d_model, V vocabulary.
"""

import torch

from twinstream.executor.kernels.calls import Calls
from twinstream.executor.kernels.operand import DTYPES, Operands
from twinstream.executor.kernels.vector.gradients import gradient_views, weight_views
from twinstream.executor.kernels.vector.vector_ops import SortedTokens, VectorOps
from twinstream.executor.kernels.workspace import Workspace
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.kernel_costs.attributes import (
    Attributes,
    required_attributes,
    typed_attribute,
)
from twinstream.models.layout import FlatLayout, embedding_layout, head_layout


def embed_forward(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Write the rows of the tokens' ids: torch's gather, which already is one pass."""
    dtype = DTYPES[typed_attribute(attributes, "dtype", str)]
    num_tokens = typed_attribute(attributes, "num_tokens", int)
    layout = embedding_layout_of(attributes)
    weight_VD = weight_views(operands["parameters"], layout, dtype)["embedding"]
    ids_T = operands["tokens"].view(torch.int32, (2, num_tokens))[0]
    output_TD = operands["output"].view(dtype, (num_tokens, weight_VD.shape[1]))
    calls.add(torch.index_select, weight_VD, 0, ids_T, out=output_TD)


def embed_backward(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Add the gradients of a chunk to the rows of its ids, each row's sum rounded once."""
    dtype = DTYPES[typed_attribute(attributes, "dtype", str)]
    num_tokens = typed_attribute(attributes, "num_tokens", int)
    gradients = operands["gradients"]
    layout = embedding_layout_of(attributes)
    gradient_VD = gradient_views(gradients, layout, attributes, calls)["embedding"]
    if gradients.mode == "write":
        calls.add(gradient_VD.zero_)
    d_hidden_TD = operands["d_hidden"].view(dtype, (num_tokens, gradient_VD.shape[1]))
    ids_T = operands["tokens"].view(torch.int32, (2, num_tokens))[0]
    workspace = Workspace(operands["scratch"].bytes)
    tokens = SortedTokens(*(workspace.take((num_tokens,), torch.int64) for _ in range(3)))
    calls.add(sort_tokens, ids_T, tokens)
    calls.add(vector.add_token_gradients, d_hidden_TD, tokens, gradient_VD, workspace.remaining())


def sort_tokens(ids_T: torch.Tensor, tokens: SortedTokens) -> None:
    """Write ids in order, which token each is of, and where the run of each ends."""
    torch.sort(tokens.last.copy_(ids_T), stable=True, out=(tokens.ids, tokens.order))
    torch.searchsorted(tokens.ids, tokens.ids, right=True, out=tokens.last).sub_(1)


def head_layout_of(attributes: Attributes) -> FlatLayout:
    return head_layout(_spec(attributes, tied=typed_attribute(attributes, "tied", bool)))


def embedding_layout_of(attributes: Attributes) -> FlatLayout:
    return embedding_layout(_spec(attributes, tied=False))


def _spec(attributes: Attributes, *, tied: bool) -> ModelSpec:
    """A spec with the sizes that matter at the ends; those of its one block are arbitrary."""
    block = {"num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 2, "d_ff": 1}
    ends = required_attributes(attributes, "d_model", "vocab_size", "dtype")
    return ModelSpec.model_validate({"name": "ends", "tied_embeddings": tied, **block, **ends})
