"""AdamW in one pass, with the random bits of the eager update (`random_bits`).

Programs take blocks in turn, so that the keys of the random bits are made once a program. Without
fused multiply-adds every result is rounded as the eager update rounds it.
"""

import triton
import triton.language as tl

from twinstream.executor.kernels.triton_kernels.codes import encoded, load_decoded
from twinstream.executor.kernels.triton_kernels.launch import device_function, launch
from twinstream.executor.kernels.triton_kernels.rounding import rounded
from twinstream.executor.kernels.vector.rounding import CLIP_EPS
from twinstream.executor.kernels.vector.updates import AdamwConstants, FlatUpdate
from twinstream.models.kernel_costs.scratch_sizes import CODE_BLOCK_ELEMENTS

# 8 elements a thread: one load of 16 bytes of each of four bf16 operands.
_BLOCK, _WARPS = 1024, 4
# Five programs for each of 132 multiprocessors, all at once: there are registers for six.
# Which program takes a block changes no bit.
_PROGRAMS = 660
_MOST_UNDECAYED = 3  # ranges: attention's norm, what lies behind qkv_proj, the FFN's norm


def adamw(flat: FlatUpdate, constants: AdamwConstants) -> None:
    num_elements, (m, v) = flat.parameter.numel(), flat.states
    master = flat.parameter if flat.master is None else flat.master
    norm = flat.step.max_norm if flat.norm is None else flat.norm
    m_scales, v_scales = flat.scales or flat.states
    skips = flat.step.skips if flat.skips is None else flat.skips
    assert len(flat.undecayed) <= _MOST_UNDECAYED, "a block has no more such ranges"
    ranges = [*flat.undecayed, *((0, 0) for _ in range(_MOST_UNDECAYED))][:_MOST_UNDECAYED]
    launch(
        _adamw_kernel, (min(_PROGRAMS, triton.cdiv(num_elements, _BLOCK)),), flat.parameter,
        flat.gradient, m, v, master, flat.step.floats, flat.step.integers, flat.step.max_norm,
        norm, skips, m_scales, v_scales, num_elements, flat.element_offset, flat.stream or 0,
        constants.beta1, 1.0 - constants.beta1, constants.beta2, 1.0 - constants.beta2,
        constants.eps, *(end for pair in ranges for end in pair),
        HAS_CODES=flat.scales is not None, CODE_BLOCK=CODE_BLOCK_ELEMENTS,
        HAS_MASTER=flat.master is not None, CLIPS=flat.norm is not None, CLIP_EPS=CLIP_EPS,
        STOCHASTIC=flat.stream is not None, MAY_SKIP=flat.skips is not None,
        BLOCK=_BLOCK, num_warps=_WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip


@device_function
def _mix(word):
    word ^= word >> 16
    word *= 0x21F0AAAD
    word ^= word >> 15
    word *= 0x735A2D97
    return word ^ (word >> 15)


@device_function
def _absorb(key, word):
    """The key after both halves of a 64-bit word."""
    key = _mix((key ^ word.to(tl.uint32)) + 0x9E3779B9)
    return _mix((key ^ (word >> 32).to(tl.uint32)) + 0x9E3779B9)


@device_function
def _key(seed, step, stream, SALT: tl.constexpr):
    key = _absorb(tl.full([], SALT, tl.uint32), seed)
    return _absorb(_absorb(key, step), stream)


@device_function
def _keys(seed_ptr, stream):
    step, seed = tl.load(seed_ptr), tl.load(seed_ptr + 1)
    return _key(seed, step, stream, 0), _key(seed, step, stream, 0x9E3779B9)


@device_function
def _random_words(start, offsets, key_0, key_1):
    """Of the elements start + offsets, 64-bit sums whose low words carry at most once."""
    low = start.to(tl.uint32) + offsets.to(tl.uint32)
    second = key_1 + (start >> 32).to(tl.uint32) * 0x21F0AAAD
    second = tl.where(low < start.to(tl.uint32), second + 0x21F0AAAD, second)
    word = low + key_0
    word = (word ^ (word >> 17) ^ second) * 0xED5AD4BB
    word = (word ^ (word >> 11)) * 0xAC4C1B51
    word = (word ^ (word >> 15)) * 0x31848BAB
    return word ^ (word >> 14)


@device_function
def _down_or_up(x, random_16):
    """Float32 to either bf16 neighbour, with a chance that keeps the mean; finite stays finite."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded_bits = tl.minimum(magnitude, 0x7F7F0000) + random_16
    rounded_bits = (rounded_bits & 0x7FFF0000) | (bits & 0x80000000)
    bits = tl.where(magnitude < 0x7F800000, rounded_bits, bits)
    return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)


@device_function
def _within(index, start, end):
    return (index >= start) & (index < end)


@device_function
def _touches(first, BLOCK: tl.constexpr, start, end):
    return (first < end) & (first + BLOCK > start)


@device_function
def _decayed(
    parameter, decay, index, first, BLOCK: tl.constexpr, start_0, end_0, start_1, end_1, start_2,
    end_2,
):  # fmt: skip
    """Without a decay in the ranges, which few blocks touch."""
    decayed = parameter * decay
    touched = _touches(first, BLOCK, start_0, end_0) | _touches(first, BLOCK, start_1, end_1)
    if touched | _touches(first, BLOCK, start_2, end_2):
        undecayed = _within(index, start_0, end_0) | _within(index, start_1, end_1)
        undecayed |= _within(index, start_2, end_2)
        decayed = tl.where(undecayed, parameter, decayed)
    return decayed


@device_function
def _rows(block, NUM_ROWS: tl.constexpr, CODE_BLOCK: tl.constexpr):
    """The rows of a block that have a scale each, and where their elements are in the block."""
    rows = tl.arange(0, NUM_ROWS)
    offsets = rows[:, None] * CODE_BLOCK + tl.arange(0, CODE_BLOCK)[None, :]
    return tl.cast(block, tl.int64) * NUM_ROWS + rows, offsets


@device_function
def _store(pointers, x, random_16, inside, STOCHASTIC: tl.constexpr):
    dtype: tl.constexpr = pointers.dtype.element_ty
    if STOCHASTIC and dtype == tl.bfloat16:
        tl.store(pointers, _down_or_up(x, random_16), mask=inside)
    else:
        tl.store(pointers, rounded(x, dtype), mask=inside)


@device_function
def _clip_scale(max_norm, norm, CLIP_EPS: tl.constexpr):
    scale = tl.div_rn(max_norm, norm + CLIP_EPS)
    scale = tl.minimum(scale, 1.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.where((max_norm == 0.0) | (max_norm == float("inf")), 1.0, scale)


@device_function
def _num_blocks(num_elements, skips_ptr, MAY_SKIP: tl.constexpr, BLOCK: tl.constexpr):
    num_blocks = tl.cdiv(num_elements, BLOCK)
    if MAY_SKIP:
        num_blocks = tl.where(tl.load(skips_ptr) != 0.0, 0, num_blocks)
    return num_blocks


@triton.jit
def _adamw_kernel(
    parameter_ptr, gradient_ptr, m_ptr, v_ptr, master_ptr, step_ptr, seed_ptr, max_norm_ptr,
    norm_ptr, skips_ptr, m_scale_ptr, v_scale_ptr, num_elements, element_offset, stream,
    beta1, rest1, beta2, rest2, eps, start_0, end_0, start_1, end_1, start_2, end_2, HAS_CODES:
    tl.constexpr, CODE_BLOCK: tl.constexpr, HAS_MASTER: tl.constexpr, CLIPS: tl.constexpr,
    CLIP_EPS: tl.constexpr, STOCHASTIC: tl.constexpr, MAY_SKIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lr, m_correction = tl.load(step_ptr), tl.load(step_ptr + 1)
    v_correction_sqrt = tl.sqrt_rn(tl.load(step_ptr + 2))
    decay = 1.0 - lr * tl.load(step_ptr + 3)
    rate, eps = tl.div_rn(lr * v_correction_sqrt, m_correction), eps * v_correction_sqrt
    if CLIPS:
        scale = _clip_scale(tl.load(max_norm_ptr), tl.load(norm_ptr), CLIP_EPS)
    if STOCHASTIC:
        key_0, key_1 = _keys(seed_ptr, tl.cast(stream, tl.int64))
    num_blocks = _num_blocks(num_elements, skips_ptr, MAY_SKIP, BLOCK)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        first = tl.cast(block, tl.int64) * BLOCK
        if HAS_CODES:
            rows, offsets = _rows(block, BLOCK // CODE_BLOCK, CODE_BLOCK)
            has_scale = rows * CODE_BLOCK < num_elements
        else:
            offsets = tl.arange(0, BLOCK)
        index = first + offsets
        inside = index < num_elements
        gradient = tl.load(gradient_ptr + index, mask=inside, other=0.0).to(tl.float32)
        if CLIPS:
            gradient = gradient * scale
        if HAS_CODES:
            m = load_decoded(m_ptr + index, m_scale_ptr + rows, inside, has_scale, True)
            v = load_decoded(v_ptr + index, v_scale_ptr + rows, inside, has_scale, False)
        else:
            m = tl.load(m_ptr + index, mask=inside, other=0.0).to(tl.float32)
            v = tl.load(v_ptr + index, mask=inside, other=0.0).to(tl.float32)
        parameter = tl.load(master_ptr + index, mask=inside, other=0.0).to(tl.float32)
        m = m * beta1 + gradient * rest1
        v = v * beta2 + gradient * gradient * rest2
        change = tl.div_rn(m * rate, tl.sqrt_rn(v) + eps)
        parameter = _decayed(
            parameter, decay, index, first, BLOCK, start_0, end_0, start_1, end_1, start_2, end_2
        ) - change  # fmt: skip
        if HAS_MASTER:
            tl.store(master_ptr + index, parameter, mask=inside)
        if STOCHASTIC:
            words = _random_words(first + element_offset, offsets, key_0, key_1)
        else:
            words = index.to(tl.uint32)
        low, high = words & 0xFFFF, words >> 16
        _store(parameter_ptr + index, parameter, low, inside, STOCHASTIC)
        if HAS_CODES:
            codes, scales = encoded(m, high, True, STOCHASTIC)
            tl.store(m_ptr + index, codes, mask=inside)
            tl.store(m_scale_ptr + rows, scales, mask=has_scale)
            codes, scales = encoded(v, low ^ high, False, STOCHASTIC)
            tl.store(v_ptr + index, codes, mask=inside)
            tl.store(v_scale_ptr + rows, scales, mask=has_scale)
        else:
            _store(m_ptr + index, m, high, inside, STOCHASTIC)
            _store(v_ptr + index, v, low ^ high, inside, STOCHASTIC)
