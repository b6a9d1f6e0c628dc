"""Plans with little on the host, where the program finds none within the caps themselves."""

from itertools import pairwise

from tests.helpers.plans import MACHINE, planned
from tests.helpers.tiny_chains import WORKLOADS, small, tiny_chain
from twinstream.models.lowering.lower import lower
from twinstream.planner.choices import OPEN
from twinstream.planner.decide import decider as deciding
from twinstream.planner.decide.decider import Decider, DoesNotFit
from twinstream.planner.lifetimes.live_bytes import ALIGNMENT_BYTES
from twinstream.planner.lifetimes.rounds import JUDGED_ROUNDS, with_rounds
from twinstream.planner.refuse.last_resort import LastResort
from twinstream.planner.search.congestion import full_shares
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps
from twinstream.schedule.proof.conforms import conforms
from twinstream.schedule.proof.verify import verify
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE, HOST


def resort_of(chain: Chain) -> LastResort:
    return LastResort(with_rounds(chain, JUDGED_ROUNDS), MACHINE, OPEN, len(chain.round_starts))


def test_a_plan_with_little_on_the_host_is_one_where_it_takes_no_more(
    monkeypatch,
):
    """Whole units move to the host, so that the program may find none at once within as much."""
    monkeypatch.setattr(deciding, "_TRIES", 1)
    six_rounds = WORKLOADS["sliced"].model_copy(update={"rounds_per_step": 6})
    chain = lower(small("tiny", num_layers=4), six_rounds)
    few, found_again = with_rounds(chain, JUDGED_ROUNDS), []
    for device_bytes in range(150_000, 500_000, 50_000):
        resort = LastResort(few, MACHINE, OPEN, len(chain.round_starts))
        taken = resort.host_bytes(Caps(device_bytes=device_bytes))
        if not taken:
            continue
        caps = Caps(device_bytes=device_bytes, host_bytes=taken)
        schedule = resort.schedule(lambda: chain, caps)
        assert schedule is not None
        assert 0 <= taken - arena_bytes(schedule, HOST) < ALIGNMENT_BYTES
        assert arena_bytes(schedule, DEVICE) <= device_bytes
        assert schedule.caps == caps
        assert not verify(schedule)
        assert not conforms(schedule, chain)
        assert resort.takes_no_more(caps)
        less = Caps(device_bytes=device_bytes, host_bytes=taken - 1)
        assert resort.schedule(lambda: chain, less) is None
        decider = Decider(few, MACHINE, caps, len(chain.round_starts))
        shares = full_shares(len(decider.small.tasks))
        found_again.append(decider.fitting(OPEN, 0, shares) is not None)
        assert arena_bytes(planned(chain, MACHINE, caps, "optimal"), HOST) <= taken
    assert False in found_again


def test_a_plan_of_few_rounds_that_does_not_fit_all_is_none(monkeypatch):
    chain = tiny_chain("sliced", num_layers=4)
    caps = Caps(device_bytes=700_000, host_bytes=10_000_000)
    resort = LastResort(with_rounds(chain, JUDGED_ROUNDS), MACHINE, OPEN, len(chain.round_starts))
    assert resort.schedule(lambda: chain, caps) is not None

    def too_large(*_: object) -> None:
        raise DoesNotFit("a byte is missing")

    monkeypatch.setattr(Decider, "schedule", too_large)
    assert resort.schedule(lambda: chain, caps) is None


def test_homes_take_no_less_than_the_program_says_and_less_where_the_device_has_more():
    """Whole units take up to a quarter more on this tiny chain."""
    chain = tiny_chain("sliced", num_layers=4)
    decider = Decider(chain, MACHINE, Caps(), len(chain.round_starts))
    resort, guide = resort_of(chain), decider.guide(OPEN)
    least, over = [], []
    for device_bytes in range(150_000, 700_000, 50_000):
        caps = Caps(device_bytes=device_bytes)
        least.append(guide.least_home_bytes(caps))
        taken = resort.host_bytes(caps)
        assert taken is not None and taken >= least[-1] > 0.0
        over.append(taken / least[-1])
        some_less = caps.model_copy(update={"host_bytes": int(0.99 * least[-1])})
        assert guide.fewest_copies(some_less) is None
        enough = caps.model_copy(update={"host_bytes": int(least[-1]) + 100})
        assert guide.fewest_copies(enough) is not None
    assert all(more >= less for more, less in pairwise(least))
    assert max(over) < 1.3
    assert guide.least_home_bytes(Caps(device_bytes=100_000)) is None
