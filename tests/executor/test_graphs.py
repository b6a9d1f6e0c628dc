"""Programs cut into graphs: every wait is satisfied, whatever the waits and what is shared."""

from collections.abc import Hashable
from random import Random
from threading import Lock

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.helpers.bodies import random_bodies
from tests.helpers.fake_gpu import FakeGpu
from tests.helpers.sketches import feed, op, sketch
from twinstream.executor.backends.cuda import CudaBackend
from twinstream.executor.program.compiled import Launch, Program, Work, compile_program
from twinstream.executor.replay.dispatch import PassOptions, run_passes
from twinstream.executor.replay.graph_classes import classify
from twinstream.executor.replay.graph_replay import GraphReplay, graphs_pay
from twinstream.executor.replay.graph_segments import Segment, cut_segments
from twinstream.executor.replay.warm_up import KernelTime
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.ops import Compute, Op

SEEDS = st.integers(0, 2**32)


def capturable(program: Program, seed: int) -> list[bool]:
    rng = Random(seed)
    return [not launch.on_host and rng.random() < 0.9 for launch in program.launches]


def drawn_contents(program: Program, seed: int) -> list[Hashable]:
    """Few different ones, so that much is shared."""
    rng = Random(seed)
    return [(launch.stream, rng.randint(0, 1)) for launch in program.launches]


# --- segments


@given(random_bodies(), SEEDS)
@settings(max_examples=200)
def test_segments_are_the_ops_of_their_streams_in_order(schedule, seed):
    program = compile_program(schedule)
    may = capturable(program, seed)
    segments = cut_segments(program, may)
    for number in range(len(program.streams)):
        found = [p for s in segments if s.stream == number for p in s.positions]
        assert found == [x.position for x in program.launches if x.stream == number]
    for segment in segments:
        if segment.captured:
            assert all(may[p] for p in segment.positions)
        elif len(segment.positions) > 1:
            raise AssertionError("what is not captured is alone")


@given(random_bodies(), SEEDS)
@settings(max_examples=200)
def test_what_a_segment_waits_for_is_launched_before_it(schedule, seed):
    program = compile_program(schedule)
    launched: set[int] = set()
    for segment in cut_segments(program, capturable(program, seed)):
        for position in segment.positions:
            assert launched.issuperset(program.launches[position].waits)
        launched.update(segment.positions)


def segments_of(*ops: Op) -> list[tuple[str, ...]]:
    program = compile_program(sketch(ops))
    found = cut_segments(program, [not launch.on_host for launch in program.launches])
    return [tuple(program.launches[p].op.op_id for p in s.positions) for s in found]


def test_waits_both_ways_cut_where_they_would_form_a_circle():
    assert segments_of(
        op("x", "h2d"), op("a", "compute", ("x",)), op("y", "h2d", ("a",)),
        op("b", "compute", ("y",)), op("c", "compute"),
    ) == [("x",), ("a",), ("y",), ("b", "c")]  # fmt: skip


def test_what_the_host_does_is_launched_alone_and_after_what_it_waits_for():
    assert segments_of(
        op("a", "compute"), op("x", "h2d"), feed("f", ("x",)), op("y", "h2d", ("f",)),
        op("b", "compute"),
    ) == [("x",), ("f",), ("a", "b"), ("y",)]  # fmt: skip


def in_round(found: Op, number: int) -> Op:
    assert isinstance(found, Compute)
    return found.model_copy(update={"label": found.label.model_copy(update={"round": number})})


def test_segments_end_with_their_round():
    assert segments_of(
        in_round(op("a", "compute"), 0), op("x", "h2d"), in_round(op("b", "compute"), 1),
        op("y", "h2d"),
    ) == [("a",), ("x",), ("b",), ("y",)]  # fmt: skip


# --- classes


def rounds(count: int) -> RankSchedule:
    """A load and a task a round, two buffers; rounds from the third on are alike."""
    ops: list[Op] = []
    for i in range(count):
        free = (f"task{i - 2}",) if i >= 2 else ()
        before = () if i >= 2 else (f"task{count - 2 + i}",)
        ops.append(op(f"load{i}", "h2d", free, before))
        ops.append(in_round(op(f"task{i}", "compute", (f"load{i}",)), i))
    return sketch(ops)


def test_alike_rounds_share_two_executables_that_take_turns():
    program = compile_program(rounds(8))
    content = [(x.stream, x.position // 2 % 2) for x in program.launches]
    segments = cut_segments(program, [True] * 16)
    classes = classify(program, segments, content)
    tasks = [i for i, s in enumerate(segments) if program.streams[s.stream].queue == "compute"]
    # two buffers, so two kinds of task, and two executables of each
    used = [classes.executables[0][i] for i in tasks]
    assert len(set(used)) == 4
    assert used[:4] == used[4:]
    assert classes.executables[1] == classes.executables[0]
    assert len({e for row in classes.events for e in row}) == 8


@given(random_bodies(), SEEDS)
@settings(max_examples=200)
def test_a_wait_takes_the_very_record_it_means_and_an_executable_has_one_meaning(schedule, seed):
    program = compile_program(schedule)
    content = drawn_contents(program, seed)
    segments = cut_segments(program, capturable(program, seed))
    classes = classify(program, segments, content)
    meaning: dict[int, object] = {}
    latest: dict[int | None, tuple[int, int]] = {}
    for number in range(6):
        own, before = classes.events[number % 2], classes.events[(number + 1) % 2]
        for s, segment in enumerate(segments):
            launches = [program.launches[p] for p in segment.positions]
            for launch in launches:
                for wait in launch.waits:
                    if own[wait] is not None:
                        assert latest[own[wait]] == (number, wait)
                for wait in launch.waits_previous if number else ():
                    if before[wait] is not None:
                        assert latest[before[wait]] == (number - 1, wait)
            events = [
                (
                    content[x.position],
                    own[x.position],
                    [own[w] for w in x.waits],
                    [before[w] for w in x.waits_previous],
                )
                for x in launches
            ]
            executable = classes.executables[number % 2][s]
            assert meaning.setdefault(executable, events) == events
            latest.update({own[x.position]: (number, x.position) for x in launches})


# --- run


class Watch:
    """Works that know, by the order of their stream, who runs, and whether it may."""

    def __init__(self, schedule: RankSchedule, program: Program, content: list[Hashable]) -> None:
        self._schedule, self._program, self._content = schedule, program, content
        self._position = {op.op_id: i for i, op in enumerate(schedule.ops)}
        self._on_stream = [
            [x.position for x in program.launches if x.stream == s]
            for s in range(len(program.streams))
        ]
        self._count = [0] * len(program.streams)
        self._lock = Lock()
        self.done: set[tuple[int, int]] = set()

    def works(self) -> list[Work]:
        return [self._work(launch) for launch in self._program.launches]

    def _work(self, launch: Launch) -> Work:
        def work(pass_index: int) -> None:
            with self._lock:
                mine = self._on_stream[launch.stream]
                number, at = divmod(self._count[launch.stream], len(mine))
                self._count[launch.stream] += 1
                self._check(number, mine[at], launch.position)

        return work

    def _check(self, number: int, position: int, captured: int) -> None:
        assert self._content[position] == self._content[captured]
        found = self._schedule.ops[position]
        needed = [(number, self._position[w]) for w in found.waits]
        if number:
            needed += [(number - 1, self._position[w]) for w in found.waits_previous]
        assert self.done.issuperset(needed), f"{found.op_id} of pass {number} is too early"
        self.done.add((number, position))


@given(random_bodies(), SEEDS, st.sampled_from([0.0, 0.4]))
@settings(max_examples=150, deadline=None)
def test_every_wait_is_satisfied_in_passes_of_graphs_and_passes_op_by_op(schedule, seed, eager):
    program = compile_program(schedule)
    assume(not program.launches[program.last_compute()].on_host)
    content = drawn_contents(program, seed)
    watch = Watch(schedule, program, content)
    gpu = FakeGpu(seed, eager)
    works = gpu.works(program, watch.works())
    backend = CudaBackend(program, works, gpu)
    replay = GraphReplay(program, works, content, backend)
    run_passes(program, backend, PassOptions(6, 2), replay.replay)
    assert len(watch.done) == 6 * len(schedule.ops)


# --- where they pay


def test_graphs_pay_where_the_host_is_slower_than_the_device():
    program = compile_program(sketch([op("a", "compute"), op("x", "h2d")]))
    assert graphs_pay(program, {"call": KernelTime(20_000, 15_000)})
    assert not graphs_pay(program, {"call": KernelTime(900_000, 15_000)})
    assert not graphs_pay(compile_program(sketch([op("x", "h2d")])), {})
    assert Segment(0, (0,), captured=True) in cut_segments(program, [True, True])
