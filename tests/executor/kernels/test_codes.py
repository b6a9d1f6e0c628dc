"""8-bit codes of m and v: their error, their mean, and what they do with zeros and NaN."""

import math

import pytest
import torch

from tests.executor.kernels.twins import randn
from twinstream.executor.kernels.codes import decoded, encode

SIGNED = pytest.mark.parametrize("signed", [True, False], ids=["m", "v"])
SMALLEST = {True: 2.0**-15, False: 2.0**-31}


def spread(count, signed, seed=0):
    """Values of a block that lie over all octaves that a code has, and signs where it has one."""
    generator = torch.Generator().manual_seed(seed)
    octaves = -math.log2(SMALLEST[signed]) * torch.rand(count, generator=generator) * 0.99
    values = 3e-7 * torch.exp2(-octaves)
    return values * randn(count, seed=seed + 1).sign() if signed else values


def there_and_back(values, signed, random_16=None):
    codes = torch.full((values.numel(),), 0xEE, dtype=torch.uint8)
    scales = torch.full((-(-values.numel() // 256),), math.nan)
    encode(values, codes, scales, random_16, signed=signed)
    return decoded(codes, scales, signed=signed), scales


@SIGNED
@pytest.mark.parametrize("count", [1, 255, 256, 257, 10_000])
def test_to_nearest_the_error_is_a_sixteenth_and_by_chance_an_eighth(signed, count):
    values = spread(count, signed)
    drawn = torch.randint(0, 2**16, (count,), generator=torch.Generator().manual_seed(count))
    for random_16, most in ((None, 1 / 16), (drawn, 1 / 8)):
        found, scales = there_and_back(values, signed, random_16)
        # a share of the scale and its product with it are rounded to float32
        assert ((found - values).abs() <= 1.00001 * most * values.abs()).all()
        assert torch.equal(scales, torch.stack([b.abs().max() for b in values.split(256)]))


@SIGNED
def test_every_code_comes_back_as_itself(signed):
    """In a block with the largest share, 1, which fixes the scale."""
    top = 120 if signed else 248
    magnitudes = list(range(1, top + 1))
    given = [*magnitudes, *(m + 128 for m in magnitudes)] if signed else magnitudes
    codes = torch.tensor([0, *given], dtype=torch.uint8)
    values = decoded(codes, torch.tensor([0.75]), signed=signed)
    again, scales = torch.empty_like(codes), torch.empty(1)
    encode(values, again, scales, None, signed=signed)
    assert torch.equal(again, codes)
    assert scales.item() == 0.75
    assert values[1 : top + 1].diff().min() > 0


@SIGNED
def test_rounding_by_chance_keeps_the_mean(signed):
    """Steps far below a code's width are not lost, as to nearest they would be."""
    count, values = 2**16, torch.full((2**16,), 0.7)
    values[::256] = 1.0
    random = torch.randint(0, 2**16, (count,), generator=torch.Generator().manual_seed(0))
    found = there_and_back(values, signed, random)[0][values != 1.0]
    assert found.unique().tolist() == [0.6875, 0.75]
    chance = (0.7 - 0.6875) * 16
    sigma = math.sqrt(chance * (1 - chance) / found.numel())
    assert abs((found == 0.75).double().mean() - chance) <= 4 * sigma


def test_small_shares_of_m_are_zero_and_of_v_never():
    values = torch.tensor([1.0, 2.0**-14, 2.0**-17, 0.0])
    assert there_and_back(values, True)[0].tolist() == [1.0, 2.0**-14, 0.0, 0.0]
    values = torch.tensor([1.0, 2.0**-30, 2.0**-40, 0.0])
    assert there_and_back(values, False)[0].tolist() == [1.0, 2.0**-30, 1.125 * 2.0**-31, 0.0]


@SIGNED
def test_zeros_are_zero_and_a_fresh_state_is(signed):
    assert there_and_back(torch.zeros(300), signed)[0].count_nonzero() == 0
    fresh = torch.zeros(300, dtype=torch.uint8)
    assert decoded(fresh, torch.zeros(2), signed=signed).count_nonzero() == 0


@SIGNED
@pytest.mark.parametrize("largest", [1e-40, 2.0**-126, 3e38])
def test_the_smallest_and_the_largest_scales_keep_their_error(signed, largest):
    """Below 2^-126 codes are shares of that, so that a scale's inverse is finite."""
    values = largest * torch.tensor([1.0, 0.3, 0.01])
    found, scales = there_and_back(values, signed)
    assert scales.item() == max(torch.tensor(largest).item(), 2.0**-126)
    assert ((found - values).abs() <= 1.00001 / 16 * values.abs()).all()


@SIGNED
def test_a_nan_spoils_its_block_and_no_other(signed):
    values = spread(600, signed)
    values[300] = math.nan
    found, _ = there_and_back(values, signed)
    assert found[256:512].isnan().all()
    assert found[:256].isfinite().all()
    assert found[512:].isfinite().all()
