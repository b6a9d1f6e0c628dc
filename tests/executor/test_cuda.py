"""The same schedule on a GPU: same bits whatever the policy, and spans that respect the waits."""

import pytest
import torch

from tests.helpers.plans import MACHINE, enough_device_bytes, planned
from tests.helpers.runs import Bits, assert_same_bits, bits_of, run
from tests.helpers.tiny_chains import tiny_chain
from twinstream.executor.backends.gpu import TorchGpu
from twinstream.executor.memory.pinned import Pinning, pinned_arena
from twinstream.executor.memory.pinned_pieces import HostRange
from twinstream.executor.program.options import RunOptions
from twinstream.executor.run.execute import Execution
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, RankSchedule

pytestmark = pytest.mark.gpu

# CUDA events are read in steps of 0.5 us, as float ms.
EVENT_STEP_NS = 2000
MODELS = [("packed", "tiny"), ("sliced", "tiny-qwen3")]


def streaming(chain: Chain) -> RankSchedule:
    caps = Caps(device_bytes=enough_device_bytes(chain, "streaming"))
    return planned(chain, MACHINE, caps, "streaming")


def on_cuda(schedule: RankSchedule, *, poison: bool = False) -> tuple[Execution, Bits]:
    return run(schedule, RunOptions(backend="cuda", num_passes=3, poison=poison))


@pytest.mark.parametrize(("workload", "preset"), MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_streaming_has_the_bits_of_resident(workload, preset, dtype):
    chain = tiny_chain(workload, preset, dtype=dtype)
    resident = planned(chain, MACHINE, Caps(), "resident")
    expected = on_cuda(resident)[1]
    assert_same_bits(on_cuda(streaming(chain))[1], expected)
    assert_same_bits(on_cuda(streaming(chain), poison=True)[1], expected)


def test_losses_are_close_to_those_of_the_cpu():
    """Sums in another order, float32 without TF32: 1e-4 after three steps of learning rate 1e-2."""
    schedule = streaming(tiny_chain("sliced", "tiny-qwen3"))
    found, expected = on_cuda(schedule)[1], bits_of(schedule)
    assert found.losses == pytest.approx(expected.losses, rel=1e-4)


def test_parameters_are_close_to_those_of_the_cpu_after_one_step():
    """A step moves each weight by at most the learning rate, 1e-2, whatever its gradient's bits."""
    schedule = streaming(tiny_chain("packed"))
    found = run(schedule, RunOptions(backend="cuda", num_passes=1))[1]
    expected = bits_of(schedule, num_steps=1)
    for name in ("param.embedding", "param.0", "param.1", "param.head"):
        on_gpu, on_cpu = (bits.state[name].view(torch.float32) for bits in (found, expected))
        assert (on_gpu - on_cpu).abs().max() <= 2.1e-2
        assert ((on_gpu - on_cpu).abs() < 1e-4).float().mean() > 0.99


def test_spans_respect_every_wait_within_and_between_passes():
    schedule = streaming(tiny_chain("packed"))
    options = RunOptions(backend="cuda", num_passes=3, timed_passes=3)
    timeline = run(schedule, options)[0].timeline
    assert timeline.provenance.where == torch.cuda.get_device_name()
    queues = [op.stream.queue for op in schedule.ops]
    position = {op.op_id: i for i, op in enumerate(schedule.ops)}
    passes = [timeline.cold, *timeline.passes]
    free: dict[str, int] = {}
    for number, spans in enumerate(passes):
        for i, op in enumerate(schedule.ops):
            # the host's clock and the device's are set equal once; they are compared loosely
            before = [free.get(str(op.stream), 0)]
            waits = [(spans, w) for w in op.waits]
            if number:
                waits += [(passes[number - 1], w) for w in op.waits_previous]
            before += [
                found.end_ns[position[w]]
                for found, w in waits
                if (queues[position[w]] == "host") == (op.stream.queue == "host")
            ]
            assert spans.start_ns[i] + EVENT_STEP_NS >= max(before)
            assert spans.end_ns[i] >= spans.start_ns[i]
            free[str(op.stream)] = spans.end_ns[i]


# --- how it is dispatched


@pytest.mark.parametrize("policy", ["resident", "streaming"])
def test_graphs_have_the_bits_of_ops_enqueued_one_by_one(policy):
    chain = tiny_chain("packed")
    schedule = (
        streaming(chain) if policy == "streaming" else planned(chain, MACHINE, Caps(), policy)
    )
    found = {
        graphs: run(schedule, RunOptions("cuda", num_passes=5, graphs=graphs))
        for graphs in ("off", "on")
    }
    assert_same_bits(found["on"][1], found["off"][1])
    told = found["on"][0].timeline.provenance.detail
    assert " graphs for " in told
    assert "refused" not in told


def test_a_wait_in_a_graph_takes_the_record_made_before_the_graph_was_launched():
    """What cutting a program into graphs rests on; the producer is slow, the consumer is not."""
    gpu = TorchGpu()
    first, second = gpu.stream("first"), gpu.stream("second")
    made, taken = gpu.new_event(), gpu.new_event()
    number, copied = (torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(2))
    for stream, event in ((first, made), (second, taken)):
        event.record(stream)

    def produce() -> None:
        taken.wait(first)
        torch.cuda._sleep(2_000_000)
        number.add_(1)
        made.record(first)

    def consume() -> None:
        made.wait(second)
        copied.copy_(number)
        taken.record(second)

    torch.cuda.synchronize()
    graphs = [(gpu.capture(first, produce), gpu.capture(second, consume)) for _ in range(2)]
    seen = []
    for turn in range(50):
        producer, consumer = graphs[turn % 2]
        gpu.use(first)
        producer.replay()
        gpu.use(second)
        consumer.replay()
        seen.append(torch.empty(1, dtype=torch.int64, pin_memory=True))
        with torch.cuda.stream(second):
            seen[-1].copy_(copied, non_blocking=True)
    torch.cuda.synchronize()
    assert [int(value) for value in seen] == list(range(1, 51))


def test_the_host_is_timed_and_the_drivers_figure_is_reported():
    schedule = streaming(tiny_chain("packed"))
    provenance = run(schedule, RunOptions("cuda", num_passes=4))[0].timeline.provenance
    memory, cost = provenance.device_memory, provenance.host_cost
    assert memory is not None
    assert cost is not None
    assert 0 < memory.before_bytes <= memory.warm_bytes <= memory.peak_bytes
    assert memory.peak_bytes >= memory.arena_bytes + memory.libraries_bytes
    assert cost.ns_per_op > 0
    assert provenance.timed_passes == 2


def test_after_a_refused_capture_the_device_goes_on():
    gpu = TorchGpu()
    stream = gpu.stream("compute")
    number = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            gpu.capture(stream, lambda: number.item())
    graph = gpu.capture(stream, lambda: number.add_(1))
    gpu.use(stream)
    graph.replay()
    with gpu.libraries_pool():
        number.add(1)
    torch.cuda.synchronize()
    assert number.item() == 1


# --- pinned memory


def test_pieces_are_pinned_and_copied_from_on_their_own():
    mib = 2**20
    slots = [HostRange(i * mib, (i + 1) * mib, f"s{i}") for i in range(6)]
    pinning = Pinning(torch.cuda.cudart(), max_piece_bytes=2 * mib)
    with pinned_arena(6 * mib, slots, pinning) as memory:
        for found in slots:
            view = memory[found.start : found.end]
            assert view.is_pinned()
            view.fill_(int(found.slot[1]))
        device = torch.cat([memory[r.start : r.end].to("cuda", non_blocking=True) for r in slots])
        torch.cuda.synchronize()
        assert torch.equal(device.view(6, mib)[:, 0].cpu(), torch.arange(6, dtype=torch.uint8))
    assert not view.is_pinned()
