"""Streams that run as late as CUDA allows, in random orders: races would change bits."""

import pytest

from tests.cuda_fake.device import FakeDevice
from tests.executor.test_cuda import streaming
from tests.helpers.plans import MACHINE, planned
from tests.helpers.runs import Bits, assert_same_bits, run
from tests.helpers.tiny_chains import tiny_chain
from twinstream.executor.program.options import Graphs, RunOptions
from twinstream.schedule.document import Caps, RankSchedule

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def schedules() -> dict[str, RankSchedule]:
    chain = tiny_chain("packed", "tiny", dtype="float32")
    return {"resident": planned(chain, MACHINE, Caps(), "resident"), "streaming": streaming(chain)}


@pytest.fixture(scope="module")
def expected(schedules: dict[str, RankSchedule]) -> Bits:
    return run(schedules["resident"], RunOptions(backend="cuda", num_passes=3, graphs="off"))[1]


@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("policy", ["resident", "streaming"])
def test_late_streams_have_the_bits_of_eager_ones(
    policy: str, poison: bool, graphs: Graphs, device: FakeDevice,
    schedules: dict[str, RankSchedule], expected: Bits,
) -> None:  # fmt: skip
    import values

    values.ERRORS.clear()
    device.late(seed=9)
    options = RunOptions(backend="cuda", num_passes=3, poison=poison, graphs=graphs)
    assert_same_bits(run(schedules[policy], options)[1], expected)
    assert values.ERRORS == []
    assert device.report().violations == {}
