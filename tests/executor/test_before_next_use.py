"""Updates at the beginning of the next step: the bits of those at the end, at rest and after."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from tests.executor.test_clipping import MAX_NORM, Outcome, assert_same, outcome_of
from tests.helpers.fake_gpu import FakeGpu
from tests.helpers.machines_for_plans import slow_link_machine
from tests.helpers.plans import MACHINE, enough_device_bytes, planned
from tests.helpers.runs import training
from tests.helpers.tiny_chains import tiny_chain
from twinstream.executor.memory.arenas import Arenas
from twinstream.executor.memory.device_memory import DeviceMeter, MemoryReading
from twinstream.executor.program.compiled import compile_program
from twinstream.executor.program.options import RunOptions
from twinstream.executor.run.cuda_run import CudaJob, run_on_gpu
from twinstream.executor.run.evaluation import EvaluationBatch, pass_losses
from twinstream.executor.run.execute import execute, execute_in, flush_in, prove
from twinstream.executor.run.training import step_state
from twinstream.executor.run.work import bind_works
from twinstream.executor.state.training_state import (
    State,
    carried_names,
    fill_carried,
    initial_state,
    read_carried,
)
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.planner.evaluate.evaluation import evaluation_of
from twinstream.schedule.derived.flush import flush_of
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.errors import TwinstreamError

BEFORE, AFTER = "device_before_next_use", "device_after_backward"
RECIPES = {
    "float32": ("float32", Recipe()),
    "bfloat16": ("bfloat16", Recipe(stochastic_rounding=True)),
    "master": ("bfloat16", Recipe(optimizer_state="float32_master", gradients="float32")),
    "8bit": ("bfloat16", Recipe(optimizer_state="8bit")),
}
RUNS = [
    *(("resident", "packed", kind) for kind in RECIPES),
    *(("streaming", workload, kind) for workload in ("packed", "sliced") for kind in RECIPES),
    ("streaming", "one chunk", "float32"),
    ("optimal", "packed", "float32"),
    ("optimal", "sliced", "bfloat16"),
]


@cache
def plan_of(
    place: str, policy: str, workload: str, kind: str = "float32", *, clips: bool = True
) -> RankSchedule:
    dtype, recipe = RECIPES[kind]
    recipe = recipe.model_copy(update={"optimizer": place, "clips": clips})
    chain = tiny_chain(workload, "tiny-qwen3" if kind == "master" else "tiny", recipe, dtype=dtype)
    if policy == "resident":
        return planned(chain, MACHINE, Caps(), policy)
    caps = Caps(device_bytes=enough_device_bytes(chain, "streaming") * 5 // 4)
    return planned(chain, slow_link_machine(), caps, policy)


@cache
def expected(workload: str, kind: str = "float32", *, clips: bool = True) -> Outcome:
    """After backward, everything on the device."""
    schedule = plan_of(AFTER, "resident", workload, kind, clips=clips)
    return outcome_of(schedule, MAX_NORM if clips else 0.0)


# --- the same bits


@pytest.mark.parametrize(("policy", "workload", "kind"), RUNS)
def test_clipped_updates_have_the_bits_of_those_after_backward(policy, workload, kind):
    """Dead bytes are NaN, those of the gradients that the first step finds, too."""
    found = outcome_of(plan_of(BEFORE, policy, workload, kind), poison=True)
    assert min(found.norms) > MAX_NORM
    assert_same(found, expected(workload, kind))


@pytest.mark.parametrize("kind", RECIPES)
def test_without_clipping_all_three_places_have_the_same_bits(kind):
    wanted = expected("packed", kind, clips=False)
    for place, policy in (("device", "streaming"), (BEFORE, "streaming"), (BEFORE, "resident")):
        schedule = plan_of(place, policy, "packed", kind, clips=False)
        assert_same(outcome_of(schedule, 0.0, poison=True), wanted)


# --- at rest


def state_of(schedule: RankSchedule) -> State:
    spec = ModelSpec.model_validate(schedule.model.spec)
    return initial_state(spec, seed=1, recipe=Recipe.model_validate(schedule.recipe))


@pytest.mark.parametrize(
    ("policy", "kind"), [("resident", "bfloat16"), ("streaming", "8bit"), ("optimal", "float32")]
)
def test_a_run_can_be_flushed_at_rest_and_go_on(policy, kind):
    """Twice after the first step, as who saves and then evaluates does, and at the end."""
    schedule = plan_of(BEFORE, policy, "packed", kind)
    flush = flush_of(schedule)
    assert flush is not None
    prove(schedule, "cpu")
    prove(flush, "cpu")
    memory = {t: torch.zeros(n, dtype=torch.uint8) for t, n in Arenas.sizes(schedule).items()}
    arenas, start, seen = Arenas(schedule, memory), state_of(schedule), {}
    loop = replace(training(schedule), max_norm=MAX_NORM, losses=[], norms=[])
    host_work = loop.host_work(schedule)

    def flushed(num_passes: int) -> State:
        flush_in(flush, memory, host_work, num_passes, options)
        return read_carried(schedule, arenas, start)

    def between(number, rest):
        rest()
        if number != 2:
            return True
        seen[1], seen[2] = flushed(number), flushed(number)
        return True

    options = RunOptions(num_passes=3, between=between, poison=True)
    fill = partial(fill_carried, schedule, state=start)
    execute_in(schedule, memory, fill, host_work, options)
    wanted = expected("packed", kind)
    found = flushed(3)
    assert_same(Outcome(loop.losses, loop.norms, found), wanted)
    two = replace(training(schedule), max_norm=MAX_NORM)
    ran = execute(
        plan_of(AFTER, "resident", "packed", kind), start,
        two.host_work(schedule), RunOptions(num_passes=2),
    )  # fmt: skip
    for state in seen.values():
        assert all(torch.equal(flat, ran.state[name]) for name, flat in state.items())


@pytest.mark.parametrize("policy", ["resident", "streaming", "optimal"])
def test_an_evaluation_after_a_flush_has_the_loss_of_the_next_step(policy):
    """Of its tokens, which are one round; the run goes on as if nothing had been."""
    schedule = plan_of(BEFORE, policy, "one chunk")
    flush, evaluation = flush_of(schedule), evaluation_of(schedule)
    assert flush is not None
    memory = {t: torch.zeros(n, dtype=torch.uint8) for t, n in Arenas.sizes(schedule).items()}
    loop = replace(training(schedule), max_norm=MAX_NORM, losses=[], norms=[])
    host_work, start, losses = loop.host_work(schedule), state_of(schedule), []

    def between(number, rest):
        rest()
        flush_in(flush, memory, host_work, number, options)
        batch = EvaluationBatch([loop.tokens(number + 1, 0)], schedule.workload.tokens_per_step)
        losses.append(pass_losses(evaluation, memory, [batch], options)[0].loss)
        return True

    options = RunOptions(num_passes=3, between=between, poison=True)
    fill = partial(fill_carried, schedule, state=start)
    execute_in(schedule, memory, fill, host_work, options)
    flush_in(flush, memory, host_work, 3, options)
    found = read_carried(schedule, Arenas(schedule, memory), start)
    assert losses == loop.losses[1:]
    assert_same(Outcome(loop.losses, loop.norms, found), expected("one chunk"))


def test_the_state_is_parameters_and_optimizer_state_alone():
    names = carried_names(plan_of(BEFORE, "streaming", "packed"))
    assert {name.split(".")[0] for name in names} == {"param", "opt"}


def test_a_run_that_ends_early_is_flushed_by_the_numbers_of_its_last_step():
    schedule = plan_of(BEFORE, "streaming", "packed")
    loop = replace(training(schedule), max_norm=MAX_NORM, losses=[], norms=[])
    options = RunOptions(num_passes=9, between=lambda number, rest: number < 3)
    found = execute(schedule, state_of(schedule), loop.host_work(schedule), options)
    assert_same(Outcome(loop.losses, loop.norms, found.state), expected("packed"))


def test_a_run_goes_on_from_the_state_of_an_earlier_one():
    schedule, state = plan_of(BEFORE, "streaming", "packed"), None
    losses: list[float] = []
    norms: list[float] = []
    for first, steps in ((1, 1), (2, 2)):
        loop = replace(
            training(schedule), max_norm=MAX_NORM, first_step=first, losses=losses, norms=norms
        )
        start = state or state_of(schedule)
        options = RunOptions(num_passes=steps)
        state = execute(schedule, start, loop.host_work(schedule), options).state
    assert state is not None
    assert_same(Outcome(losses, norms, state), expected("packed"))


def test_updates_are_told_the_numbers_of_the_step_before_or_that_there_are_none():
    schedule = plan_of(BEFORE, "streaming", "packed")
    loop = replace(training(schedule), learning_rate=lambda step: step / 8, first_step=5)
    work = loop.host_work(schedule)
    fed = next(op for op in schedule.ops if op.kind == "feed" and op.source == "update_state")
    now = next(op for op in schedule.ops if op.kind == "feed" and op.source == "step_state")
    nothing = work.feed(fed, 0)
    assert torch.equal(work.feed(fed, 1), work.feed(now, 0))
    recipe, tokens = Recipe.model_validate(schedule.recipe), schedule.workload.tokens_per_step
    sixth = step_state(recipe, 6, 6 / 8, loop.seed, num_targets=tokens)
    assert bytes(work.feed(fed, 2).tolist()) == sixth
    work.flushed(2)
    assert torch.equal(work.feed(fed, 2), nothing)
    assert torch.equal(work.feed(fed, 3), work.feed(now, 2))


def test_a_flush_is_run_for_one_pass():
    schedule = plan_of(BEFORE, "streaming", "packed")
    flush, loop = flush_of(schedule), training(schedule)
    assert flush is not None
    with pytest.raises(TwinstreamError, match=r"run for 2 passes: run it for one"):
        execute(flush, state_of(schedule), loop.host_work(flush), RunOptions(num_passes=2))


# --- on a GPU


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_on_a_gpu_nothing_is_warmed_up_where_the_state_is_in_place(graphs):
    """On the device, where running kernels on zeros would destroy it."""
    schedule = plan_of(BEFORE, "resident", "packed")
    flush = flush_of(schedule)
    assert flush is not None
    memory = {t: torch.zeros(n, dtype=torch.uint8) for t, n in Arenas.sizes(schedule).items()}
    arenas, start = Arenas(schedule, memory), state_of(schedule)
    loop = replace(training(schedule), max_norm=MAX_NORM, losses=[], norms=[])
    work = loop.host_work(schedule)
    options = RunOptions("cuda", num_passes=3, graphs=graphs, poison=True)
    said = []
    for each, host_work, asked, fill in (
        (schedule, work, options, lambda: fill_carried(schedule, arenas, start)),
        (flush, work.of_pass(3), replace(options, num_passes=1, in_place=True), lambda: None),
    ):
        gpu, program = FakeGpu(3, 0.5), compile_program(each)
        inside = Arenas(each, memory)
        works = bind_works(each, inside, host_work, RunOptions("cuda", poison=True))
        job = CudaJob(each, program, inside, gpu.works(program, works, inside), fill)
        meter = DeviceMeter(Caps(), 0, lambda: MemoryReading(0, 0))
        said.append(run_on_gpu(gpu, job, asked, meter)[1])
    found = read_carried(schedule, arenas, start)
    assert_same(Outcome(loop.losses, loop.norms, found), expected("packed"))
    assert " graphs for " in said[0] or graphs == "off"
    assert said[1].startswith("no graphs")
