"""Where a chain's optimizer runs, in which order, and what it costs there."""

import pytest

from tests.helpers.tiny_chains import WORKLOADS, small, tiny_chain
from twinstream.models.lowering.declarations import Shapes, optimizer_parts
from twinstream.models.presets import load_preset
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.chain import Chain, Task
from twinstream.schedule.errors import TwinstreamError

PRESETS = ("tiny", "tiny-qwen3")
WORKLOAD_NAMES = ("packed", "sliced", "one chunk")


def on_host(chain: Chain) -> list[Task]:
    return [task for task in chain.tasks if chain.calls[task.call].processor == "host"]


def kinds(tasks: list[Task]) -> list[str]:
    return [task.label.kind for task in tasks]


@pytest.mark.parametrize("workload", WORKLOAD_NAMES)
@pytest.mark.parametrize("preset", PRESETS)
def test_on_the_host_the_tasks_are_the_same_in_the_same_order(workload, preset):
    device = tiny_chain(workload, preset)
    host = tiny_chain(workload, preset, Recipe(optimizer="host"))
    assert on_host(device) == []
    assert host.tasks == device.tasks
    assert {task.task_id for task in on_host(host)} == {
        task.task_id for task in device.tasks if task.label.kind == "optimizer_step"
    }
    assert host.recipe["optimizer"] == "host"


def test_an_update_moves_its_bytes_through_host_dram():
    """Parameter, gradient, m and v are read, parameter, m and v written: seven times."""
    chain = tiny_chain("packed", recipe=Recipe(optimizer="host"))
    sizes = {t.tensor_id: t.size_bytes for t in chain.tensors}
    for task in on_host(chain):
        (work,) = chain.calls[task.call].cost
        parameters = next(o.tensor for o in task.operands if o.name == "parameters")
        assert (work.hbm_bytes, work.host_dram_bytes) == (0, 7 * sizes[parameters])


def test_a_layer_too_large_for_one_task_is_updated_in_parts_of_2_gib_at_most():
    mixtral, small_one = load_preset("mixtral-8x22b"), load_preset("qwen3-30b-a3b")
    parts = optimizer_parts(mixtral, "0.experts")
    assert len(parts) == 3  # 8 x 3 x 16384 x 6144 in bfloat16 are 4.5 GiB
    assert sum(part.num_elements for part in parts) == 8 * 3 * 16384 * 6144
    assert [part.element_offset for part in parts[1:]] == [
        sum(p.num_elements for p in parts[:i]) for i in (1, 2)
    ]
    assert all(part.num_elements * 2 <= 2 << 30 for part in parts)
    assert all(part.element_offset % 256 == 0 for part in parts)
    assert len(optimizer_parts(small_one, "0.experts")) == 1
    assert len(optimizer_parts(mixtral, "0.experts", Recipe(update="muon"))) == 1


@pytest.mark.parametrize("workload", WORKLOAD_NAMES)
@pytest.mark.parametrize("preset", PRESETS)
def test_after_backward_all_updates_follow_the_last_gradient_in_the_models_order(workload, preset):
    chain = tiny_chain(workload, preset, Recipe(optimizer="host_after_backward"))
    updates = [i for i, t in enumerate(chain.tasks) if t.label.kind == "optimizer_step"]
    assert updates == list(range(updates[0], len(chain.tasks)))
    shapes = Shapes(small(preset), WORKLOADS[workload])
    wanted = [
        f"optimizer.{p.suffix}" for g in shapes.groups for p in optimizer_parts(shapes.spec, g)
    ]
    assert [chain.tasks[i].task_id for i in updates] == wanted


@pytest.mark.parametrize("preset", PRESETS)
def test_after_backward_the_device_updates_embedding_and_head_first(preset):
    chain = tiny_chain("packed", preset, Recipe(optimizer="device_after_backward"))
    updates = [t.task_id for t in chain.tasks if t.label.kind == "optimizer_step"]
    assert [t.task_id for t in chain.tasks[-len(updates) :]] == updates
    shapes = Shapes(small(preset), WORKLOADS["packed"])
    layers = [str(layer) for layer in range(small(preset).num_layers)]
    groups = ["embedding", "head", *layers]
    wanted = [f"optimizer.{p.suffix}" for g in groups for p in optimizer_parts(shapes.spec, g)]
    assert updates == wanted
    assert on_host(chain) == []
    ordinary = tiny_chain("packed", preset)
    assert {t.task_id for t in chain.tasks} == {t.task_id for t in ordinary.tasks}
    assert chain.calls == ordinary.calls


@pytest.mark.parametrize("preset", PRESETS)
def test_after_backward_the_host_adds_up_the_gradients_of_every_round_but_the_first(preset):
    chain = tiny_chain("packed", preset, Recipe(optimizer="host_after_backward"))
    shapes = Shapes(small(preset), WORKLOADS["packed"])
    sizes = {t.tensor_id: t.size_bytes for t in chain.tensors}
    added = [task for task in on_host(chain) if task.label.kind == "accumulate"]
    assert [task.task_id for task in added] == [
        f"r1.accumulate.{group}" for group in reversed(shapes.groups)
    ]
    for task in added:
        total, new = task.operands
        assert (total.mode, new.mode) == ("update", "read")
        (work,) = chain.calls[task.call].cost
        assert work.host_dram_bytes == 3 * sizes[total.tensor]


@pytest.mark.parametrize("preset", PRESETS)
def test_after_backward_the_device_makes_every_rounds_gradients_afresh(preset):
    chain = tiny_chain("packed", preset, Recipe(optimizer="host_after_backward"))
    first: dict[tuple[str, int | None], str] = {}
    for task in chain.tasks:
        for operand in task.operands:
            if operand.name in ("gradients", "embedding_gradients") and task not in on_host(chain):
                first.setdefault((operand.tensor, task.label.round), operand.mode)
    assert set(first.values()) == {"write"}
    assert {name for name, _ in first} == {
        f"{kind}.{group}"
        for kind in ("grad", "round_grad")
        for group in Shapes(small(preset), WORKLOADS["packed"]).groups
    }


def test_with_one_round_nothing_is_added_up():
    chain = tiny_chain("one chunk", recipe=Recipe(optimizer="host_after_backward"))
    assert set(kinds(on_host(chain))) == {"optimizer_step"}
    assert not [t for t in chain.tensors if t.tensor_id.startswith("round_grad")]


@pytest.mark.parametrize("workload", WORKLOAD_NAMES)
@pytest.mark.parametrize("preset", PRESETS)
def test_clipping_sums_squares_of_final_gradients_and_updates_after_the_norm(workload, preset):
    chain = tiny_chain(workload, preset, Recipe(clips=True))
    assert chain.recipe["optimizer"] == "device_after_backward"
    tasks = list(chain.tasks)
    names = [task.task_id for task in tasks]
    squared = [name for name in names if name.startswith("gradient_squares.")]
    assert squared == [f"gradient_squares.{group}" for group in ("head", "1", "0", "embedding")]
    for name in squared:
        task = tasks[names.index(name)]
        gradient = f"grad.{task.task_id.removeprefix('gradient_squares.')}"
        touching = [
            i for i, t in enumerate(tasks) if any(o.tensor == gradient for o in t.operands)
            and t.label.kind.endswith(("backward", "loss"))
        ]  # fmt: skip
        assert names.index(name) == touching[-1] + 1, "as soon as the last contribution is there"
    norm = names.index("gradient_norm")
    updates = [i for i, t in enumerate(tasks) if t.label.kind == "optimizer_step"]
    assert updates == list(range(norm + 1, len(tasks)))
    assert all("norm" in [o.name for o in tasks[i].operands] for i in updates)
    assert [output.sink for output in chain.outputs] == ["loss", "grad_norm"]


def test_squares_move_the_bytes_of_every_gradient_once():
    chain = tiny_chain("packed", "tiny", Recipe(clips=True, gradients="float32"), dtype="bfloat16")
    sizes = {t.tensor_id: t.size_bytes for t in chain.tensors}
    for task in chain.tasks:
        if task.label.kind == "gradient_squares":
            (work,) = chain.calls[task.call].cost
            gradient = sizes[task.operands[0].tensor]
            assert work.hbm_bytes == gradient + 8  # a share is written, and read
            assert work.flops == 2 * gradient // 4


def test_without_clipping_nothing_is_different():
    ordinary = tiny_chain("packed", recipe=Recipe(optimizer="device_after_backward"))
    clipped = tiny_chain("packed", recipe=Recipe(clips=True))
    kinds = ("gradient_squares", "gradient_norm")
    assert [t.task_id for t in clipped.tasks if t.label.kind not in kinds] == [
        t.task_id for t in ordinary.tasks
    ]
    assert not [t for t in ordinary.tensors if "norm" in t.tensor_id and "grad" in t.tensor_id]


@pytest.mark.parametrize("place", ["host", "host_after_backward"])
def test_an_optimizer_on_the_host_cannot_clip(place):
    with pytest.raises(TwinstreamError, match=f"the optimizer '{place}' cannot clip"):
        tiny_chain("packed", recipe=Recipe(clips=True, optimizer=place))


# --- at the beginning of the next step


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("workload", WORKLOAD_NAMES)
@pytest.mark.parametrize("preset", PRESETS)
def test_before_next_use_a_group_is_updated_just_before_the_first_task_that_reads_it(
    workload, preset, clips
):
    chain = tiny_chain(workload, preset, Recipe(optimizer="device_before_next_use", clips=clips))
    tasks, shapes = list(chain.tasks), Shapes(small(preset), WORKLOADS[workload])
    for group in shapes.groups:
        parts = [f"optimizer.{part.suffix}" for part in optimizer_parts(shapes.spec, group)]
        first = min(i for i, t in enumerate(tasks) if t.task_id in parts)
        assert [t.task_id for t in tasks[first : first + len(parts)]] == parts
        reads = [
            i for i, t in enumerate(tasks)
            if t.label.kind != "optimizer_step"
            and any(o.tensor == f"param.{group}" for o in t.operands)
        ]  # fmt: skip
        assert reads[0] == first + len(parts), group
        assert first == chain.round_starts[0] or group != "embedding"


@pytest.mark.parametrize("clips", [False, True])
def test_before_next_use_the_gradients_of_the_step_before_are_found_and_then_made_afresh(clips):
    chain = tiny_chain("packed", "tiny", Recipe(optimizer="device_before_next_use", clips=clips))
    found: dict[str, list[tuple[str, int]]] = {}
    for task in chain.tasks:
        for operand in task.operands:
            if operand.tensor == "grad.0":
                found.setdefault(task.label.kind, []).append((operand.mode, operand.version))
    assert found["optimizer_step"] == [("read", 0)]
    assert found["block_backward"] == [("write", 1), ("update", 1), ("update", 2), ("update", 3)]
    shapes = Shapes(small("tiny"), WORKLOADS["packed"])
    left = [f"grad.{group}" for group in shapes.groups] + ["grad_norm"] * clips
    assert chain.persistent == (*shapes.persistent, *left)
    numbers = {o.tensor for t in chain.tasks for o in t.operands if o.name == "step_state"}
    assert numbers == {"step_state", "update_state"}
    assert {"step_state", "update_state"} <= {fed.source for fed in chain.inputs}


def test_before_next_use_what_is_computed_is_the_same_but_for_a_call_that_may_skip():
    before = tiny_chain("packed", recipe=Recipe(clips=True, optimizer="device_before_next_use"))
    after = tiny_chain("packed", recipe=Recipe(clips=True))
    assert sorted(t.task_id for t in before.tasks) == sorted(t.task_id for t in after.tasks)
    assert before.calls.keys() == after.calls.keys()
    for name, call in before.calls.items():
        more = {"may_skip": True} if call.kernel.startswith("adamw") else {}
        assert call.attributes == after.calls[name].attributes | more
        unit = {"unit": "adamw_may_skip"} if more else {}  # which keeps what it may put back
        assert call.cost == tuple(w.model_copy(update=unit) for w in after.calls[name].cost)
