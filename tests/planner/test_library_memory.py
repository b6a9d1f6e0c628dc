"""Device memory that attention's library takes by itself is kept free for it."""

import pytest

from tests.helpers.plans import MACHINE, enough_device_bytes, planned
from tests.helpers.tiny_chains import tiny_chain
from twinstream.models.kernel_costs.workspace import library_bytes
from twinstream.models.recipe import KernelChoice, Recipe
from twinstream.planner.bound.lower_bound import lower_bound
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE


def chain_with(attention: str) -> Chain:
    return tiny_chain("packed", recipe=Recipe(kernels=KernelChoice(attention=attention)))


def largest_library_bytes(chain: Chain) -> int:
    return max(library_bytes(call) for call in chain.calls.values())


@pytest.mark.parametrize("policy", ["streaming", "resident", "optimal"])
def test_the_arena_leaves_what_the_largest_call_takes(policy):
    chain = chain_with("sdpa_cpu")
    library = largest_library_bytes(chain)
    assert library > 0
    smallest = enough_device_bytes(chain, policy)
    schedule = planned(chain, MACHINE, Caps(device_bytes=smallest), policy)
    assert schedule.caps == Caps(device_bytes=smallest, library_bytes=library)
    assert arena_bytes(schedule, DEVICE) + library <= smallest


@pytest.mark.parametrize("share", [0.2, 0.6, 1.0])
def test_the_search_of_optimal_knows_that_the_arena_is_smaller(share):
    """From the smallest cap of `streaming` to that of `resident`."""
    chain = chain_with("sdpa_cpu")
    least, most = (enough_device_bytes(chain, policy) for policy in ("streaming", "resident"))
    cap_bytes = round(least + share * (most - least))
    schedule = planned(chain, MACHINE, Caps(device_bytes=cap_bytes), "optimal")
    assert arena_bytes(schedule, DEVICE) <= cap_bytes - largest_library_bytes(chain)


def least_bounded_bytes(chain: Chain) -> int:
    """The smallest device cap with which the bound does not rule every schedule out."""

    def bounded(device_bytes: int) -> bool:
        return lower_bound(chain, MACHINE, Caps(device_bytes=device_bytes)) is not None

    ruled_out, enough = 0, 2**24
    while enough - ruled_out > 1:
        middle = (ruled_out + enough) // 2
        ruled_out, enough = (ruled_out, middle) if bounded(middle) else (middle, enough)
    return enough


def test_the_bound_is_of_an_arena_smaller_by_it():
    chain = chain_with("sdpa_cpu")
    assert chain.library_bytes == largest_library_bytes(chain)
    without = chain.model_copy(update={"library_bytes": 0})
    assert least_bounded_bytes(chain) == least_bounded_bytes(without) + chain.library_bytes


def test_eager_attention_leaves_the_arena_all_of_the_cap():
    schedule = planned(chain_with("eager"), MACHINE, Caps(device_bytes=2**40), "resident")
    assert schedule.caps.library_bytes == 0
