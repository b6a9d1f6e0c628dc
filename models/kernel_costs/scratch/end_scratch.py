"""The scratch that the kernels at a decoder's ends take: head and embedding."""

from collections.abc import Callable

from twinstream.models.decoders.sizes import ITEMSIZE_BYTES
from twinstream.models.kernel_costs.attributes import (
    Attributes,
    gradient_dtype_name,
    is_frozen,
    typed_attribute,
)
from twinstream.models.kernel_costs.scratch_sizes import (
    FLOAT64_BYTES,
    INT64_BYTES,
    embed_block_columns,
    float32_bytes,
    head_block_rows,
    partial_sum_bytes,
)
from twinstream.models.layout import aligned


def head_loss(attributes: Attributes) -> int:
    """Normed rows, logits and rstd of a slice, losses, d_norm; a float32 block of logits."""
    return _head_buffers(attributes) + float32_bytes(_head_block_elements(attributes))


def head_loss_triton(attributes: Attributes) -> int:
    """The same without a block of logits; with partial sums of the norm's gradient."""
    if is_frozen(attributes):
        return _head_buffers(attributes)
    d_model = typed_attribute(attributes, "d_model", int)
    return _head_buffers(attributes) + partial_sum_bytes(_head_rows(attributes), d_model)


def with_pairs(of_rows: Callable[[Attributes], int]) -> Callable[[Attributes], int]:
    """Return what a head takes, with what it has of pairs beside the passes over its rows."""
    return lambda attributes: of_rows(attributes) + _of_pairs(attributes)


def _of_pairs(attributes: Attributes) -> int:
    """One as a scale; of each row its scale, its loss in float64, its number and its sequence's."""
    tokens = typed_attribute(attributes, "num_tokens", int)
    return float32_bytes(1) + 3 * float32_bytes(tokens) + aligned(tokens * FLOAT64_BYTES)


def head_evaluate(attributes: Attributes) -> int:
    """What the loss alone takes, and a float32 block of logits."""
    return head_forward_buffers(attributes) + float32_bytes(_head_block_elements(attributes))


def head_logits(attributes: Attributes) -> int:
    """Normed rows of the last tokens, and their logits in the model's dtype."""
    rows, vocab_size, d_model = (
        typed_attribute(attributes, name, int) for name in ("num_rows", "vocab_size", "d_model")
    )
    itemsize = _itemsize(attributes)
    return aligned(rows * d_model * itemsize) + aligned(rows * vocab_size * itemsize)


def _head_buffers(attributes: Attributes) -> int:
    if is_frozen(attributes):
        return head_forward_buffers(attributes)
    d_norm = float32_bytes(typed_attribute(attributes, "d_model", int))
    return head_forward_buffers(attributes) + d_norm


def head_forward_buffers(attributes: Attributes) -> int:
    tokens, vocab_size, d_model = (
        typed_attribute(attributes, name, int) for name in ("num_tokens", "vocab_size", "d_model")
    )
    rows, itemsize = _head_rows(attributes), _itemsize(attributes)
    slices = aligned(rows * d_model * itemsize) + aligned(rows * vocab_size * itemsize)
    return slices + float32_bytes(rows) + float32_bytes(tokens)


def _head_rows(attributes: Attributes) -> int:
    row_slice, tokens = (typed_attribute(attributes, n, int) for n in ("row_slice", "num_tokens"))
    return min(row_slice, tokens)


def _head_block_elements(attributes: Attributes) -> int:
    vocab_size = typed_attribute(attributes, "vocab_size", int)
    return head_block_rows(vocab_size, _head_rows(attributes)) * vocab_size


def embed_backward(attributes: Attributes) -> int:
    """Sorted tokens; two float32 blocks of columns, one in each dtype of rows."""
    tokens, d_model = (typed_attribute(attributes, n, int) for n in ("num_tokens", "d_model"))
    elements = tokens * embed_block_columns(tokens, d_model)
    dtypes = {typed_attribute(attributes, "dtype", str), gradient_dtype_name(attributes)}
    rows = sum(aligned(elements * ITEMSIZE_BYTES[dtype]) for dtype in dtypes)
    return _sorted_tokens(tokens) + 2 * float32_bytes(elements) + rows


def embed_backward_triton(attributes: Attributes) -> int:
    return _sorted_tokens(typed_attribute(attributes, "num_tokens", int))


def _sorted_tokens(tokens: int) -> int:
    """Ids, order, and the last of each run."""
    return 3 * aligned(tokens * INT64_BYTES)


def _itemsize(attributes: Attributes) -> int:
    return ITEMSIZE_BYTES[typed_attribute(attributes, "dtype", str)]
