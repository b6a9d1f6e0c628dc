"""The vector operations in torch ops: they run everywhere, and are the oracle of the others."""

from twinstream.executor.kernels import base_codes
from twinstream.executor.kernels.vector import (
    cross_entropy,
    experts,
    gradients,
    ordered_sums,
    query_key,
    rms_norm,
    swiglu,
    token_gradients,
    updates,
)


class EagerVector:
    """Implements `VectorOps`."""

    product_with_backward = False

    write_normed = staticmethod(rms_norm.write_normed)
    rms_norm_backward = staticmethod(rms_norm.rms_norm_backward)
    write_rotated = staticmethod(query_key.write_rotated)
    rotated_backward = staticmethod(query_key.rotated_backward)
    write_swiglu = staticmethod(swiglu.write_swiglu)
    swiglu_backward = staticmethod(swiglu.swiglu_backward)
    add_column_sums = staticmethod(gradients.add_column_sums)
    cross_entropy = staticmethod(cross_entropy.cross_entropy)
    add_token_gradients = staticmethod(token_gradients.add_token_gradients)
    sum_squares = staticmethod(ordered_sums.sum_squares)
    square_shares = staticmethod(ordered_sums.square_shares)
    sum_values = staticmethod(ordered_sums.sum_values)
    root_of_sum = staticmethod(ordered_sums.root_of_sum)
    write_dequantized = staticmethod(base_codes.write_dequantized)
    grouped_matmul = staticmethod(experts.grouped_matmul)
    add_grouped_gradient = staticmethod(experts.add_grouped_gradient)
    add_rows = staticmethod(experts.add_rows)
    weigh_rows = staticmethod(experts.weigh_rows)
    adamw = staticmethod(updates.update_adamw)
