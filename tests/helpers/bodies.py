"""Random loop bodies: ops on queues with waits; what they do does not matter."""

from random import Random

from hypothesis import strategies as st

from tests.helpers.sketches import feed, fetch, op, sketch
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.ops import Stream

QUEUES = ["compute", "compute2", "h2d", "d2h", "host", "network"]


@st.composite
def random_bodies(draw) -> RankSchedule:
    """Any ops with any waits, within the pass and into the pass before; memory does not matter."""
    rng = Random(draw(st.integers(0, 2**32)))
    ops = []
    for number in range(rng.randint(1, draw(st.integers(1, 16)))):
        name, queue = f"op{number}", rng.choice(QUEUES)
        make = rng.choice([feed, fetch]) if queue == "host" else (lambda *a, q=queue: op(a[0], q))
        made = make(name)
        if rng.random() < 0.2:
            made = made.model_copy(update={"stream": Stream(device=1, queue=queue)})
        ops.append(made)
    waiting = []
    for number, found in enumerate(ops):
        others = [o.op_id for o in ops[:number] if o.stream != found.stream]
        waits = rng.sample(others, min(len(others), rng.choice([0, 0, 1, 2, 3])))
        previous = rng.sample([o.op_id for o in ops], min(len(ops), rng.choice([0, 0, 1, 2])))
        update = {"waits": tuple(waits), "waits_previous": tuple(previous)}
        waiting.append(found.model_copy(update=update))
    return sketch(waiting)
