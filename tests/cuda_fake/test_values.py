"""What the fake device computes, held against the same on the CPU."""

import pytest
import torch

pytestmark = pytest.mark.gpu


def test_equal_tensors_are_equal_and_others_are_not():
    numbers = torch.arange(8.0)
    assert torch.equal(numbers.cuda(), numbers.cuda())
    assert not torch.equal(numbers.cuda(), numbers.flip(0).cuda())


def test_a_generator_draws_the_same_from_the_same_seed_and_goes_on():
    one, other = (torch.Generator("cuda").manual_seed(3) for _ in range(2))
    first, second = (torch.randn(4096, generator=one, device="cuda").cpu() for _ in range(2))
    assert torch.equal(first, torch.randn(4096, generator=other, device="cuda").cpu())
    assert not torch.equal(first, second)
    assert abs(first.mean()) < 0.1 and abs(first.std() - 1.0) < 0.1
