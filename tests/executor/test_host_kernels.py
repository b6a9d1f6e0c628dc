"""Updates on the host's cores, beside the device's compute: the bits of the same on the device."""

import pytest
import torch

from tests.helpers.host_chains import tiny_chain_of
from tests.helpers.plans import MACHINE, planned
from tests.helpers.runs import assert_same_bits, bits_of
from tests.helpers.tiny_chains import tiny_chain
from twinstream.models.recipes.recipe import Recipe
from twinstream.models.recipes.update_rules import UpdateRule
from twinstream.planner.policies import optimizer_place
from twinstream.schedule.document import Caps
from twinstream.schedule.ops import HOST_COMPUTE, Compute


@pytest.mark.parametrize("policy", ["optimizer_offload", "layer_offload"])
def test_updates_on_the_host_have_the_bits_of_the_device(policy: str) -> None:
    """With one round, in which the host adds nothing up; each number is rounded by its own bits."""
    on_host = planned(tiny_chain_of(policy, "one chunk"), MACHINE, Caps(), policy)
    on_device = planned(tiny_chain_of("resident", "one chunk"), MACHINE, Caps(), "resident")
    queues = {op.stream.queue for op in on_host.ops if isinstance(op, Compute)}
    assert HOST_COMPUTE in queues
    assert_same_bits(bits_of(on_host, poison=True), bits_of(on_device))


@pytest.mark.parametrize("rule", ["sgd", "lion"])
def test_other_rules_on_the_host_have_the_bits_of_the_device(rule: UpdateRule) -> None:
    found = []
    for policy in ("optimizer_offload", "resident"):
        recipe = Recipe(optimizer=optimizer_place(policy), update=rule)
        found.append(planned(tiny_chain("one chunk", "tiny", recipe), MACHINE, Caps(), policy))
    assert any(call.kernel == "element_step/host" for call in found[0].calls.values())
    assert_same_bits(*map(bits_of, found))


def test_updates_of_some_groups_on_the_host_have_the_bits_of_the_device() -> None:
    """Planned within little device memory, so that state of both kinds moves."""
    found = []
    for groups in ((), ("head", "1")):
        chain = tiny_chain("packed", "tiny", Recipe(host_groups=groups))
        found.append(planned(chain, MACHINE, Caps(device_bytes=5 * 2**20), "optimal"))
    queues = [{op.stream.queue for op in one.ops if isinstance(op, Compute)} for one in found]
    assert [HOST_COMPUTE in queue for queue in queues] == [False, True]
    assert_same_bits(bits_of(found[1], poison=True), bits_of(found[0]))


def test_muon_stays_on_the_device() -> None:
    assert Recipe(update="muon").places_among(("host", "device")) == ("device",)


def test_gradients_that_the_host_adds_up_are_rounded_once_more() -> None:
    """A round's own are rounded before they are added: the losses differ by that, and no more."""
    chains = [tiny_chain_of(policy, "packed") for policy in ("layer_offload", "resident")]
    on_host = bits_of(planned(chains[0], MACHINE, Caps(), "layer_offload"))
    on_device = bits_of(planned(chains[1], MACHINE, Caps(), "resident"))
    assert on_host.losses[0] == on_device.losses[0]
    torch.testing.assert_close(
        torch.tensor(on_host.losses), torch.tensor(on_device.losses), rtol=2e-3, atol=0
    )
