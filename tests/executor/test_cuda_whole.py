"""The whole executor on a GPU, with the kernels that are meant for it."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.gpu.device import measuring
from benchmarks.gpu.device.measuring import MeasuringSession
from benchmarks.gpu.peers.measure import PeerWork, measure_peer
from tests.helpers.hf_weights import unpack_hf_state
from tests.helpers.plans import MACHINE, enough_device_bytes, planned
from tests.helpers.runs import Bits, assert_same_bits, run
from tests.helpers.tiny_chains import WORKLOADS
from twinstream.executor.memory.pinned import Pinning
from twinstream.executor.probe.tasks.chain_memory import ChainMemory, run_round
from twinstream.executor.probe.tasks.trial import TOLERANCE, differs_from_eager
from twinstream.executor.program.options import RunOptions
from twinstream.models.lowering.lower import lower
from twinstream.models.recipe import KernelChoice, Recipe
from twinstream.models.spec import ModelSpec
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE, HOST

pytestmark = pytest.mark.gpu

BACKEND = "cuda"
FAST = KernelChoice(vector="triton", attention="sdpa_flash")
CHOICES = {
    "eager": KernelChoice(),
    "triton": KernelChoice(vector="triton"),
    "flash": KernelChoice(attention="sdpa_flash"),
    "fast": FAST,
}
_GIB = 2**30


def spec_of(dtype: str = "bfloat16") -> ModelSpec:
    return ModelSpec(
        name="small", num_layers=3, d_model=256, num_heads=4, num_kv_heads=2, head_dim=64,
        d_ff=512, vocab_size=512, dtype=dtype,
    )  # fmt: skip


def chain_of(workload: str, kernels: KernelChoice = FAST, dtype: str = "bfloat16") -> Chain:
    return lower(spec_of(dtype), WORKLOADS[workload], Recipe(kernels=kernels))


def bits(schedule: RankSchedule, **options: object) -> Bits:
    given = RunOptions(backend=BACKEND, num_passes=4, **options)
    return run(schedule, given)[1]


@pytest.mark.parametrize("workload", ["packed", "sliced", "unequal"])
@pytest.mark.parametrize("kernels", ["eager", "fast"])
def test_every_plan_has_the_bits_of_resident(kernels, workload):
    chain = chain_of(workload, CHOICES[kernels])
    resident = planned(chain, MACHINE, Caps(), "resident")
    expected = bits(resident)
    least = enough_device_bytes(chain, "streaming")
    less = Caps(device_bytes=arena_bytes(resident, DEVICE) - 1)
    for schedule in (
        planned(chain, MACHINE, less, "resident"),  # recomputes
        planned(chain, MACHINE, Caps(device_bytes=least), "streaming"),
        planned(chain, MACHINE, Caps(device_bytes=least * 5 // 4), "optimal"),
    ):
        assert_same_bits(bits(schedule), expected)
    assert_same_bits(bits(schedule, poison=True), expected)


@pytest.mark.parametrize("workload", ["packed", "sliced", "unequal"])
def test_graphs_change_no_bit(workload):
    chain = chain_of(workload)
    least = enough_device_bytes(chain, "streaming")
    schedule = planned(chain, MACHINE, Caps(device_bytes=least), "streaming")
    assert_same_bits(bits(schedule, graphs="on"), bits(schedule, graphs="off"))


@pytest.mark.parametrize("name", ["triton", "flash", "fast"])
def test_kernels_are_as_close_to_the_eager_ones_as_rounding_allows(name):
    found = differs_from_eager(CHOICES[name], torch.device(BACKEND))
    assert found.relative <= TOLERANCE["bfloat16"], found.tensor


@pytest.mark.parametrize("kernels", ["eager", "triton", "fast"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loss_and_gradients_agree_with_transformers(dtype, kernels):
    """float32 without TF32: 1e-4. bf16: within 3 % of the largest value of each tensor."""
    if (dtype, kernels) == ("float32", "fast"):
        pytest.skip("flash attention computes bf16")
    spec, chain = spec_of(dtype), chain_of("packed", CHOICES[kernels], dtype)
    device = torch.device(BACKEND)
    memory = ChainMemory(chain, device)
    weights = _by_hf_names(memory, spec, "param")
    run_round(chain, memory)
    found = _by_hf_names(memory, spec, "grad")
    loss, expected = _hf_gradients(spec, weights, memory, chain)
    limit = 1e-4 if dtype == "float32" else 3e-2
    ours = float(memory.buffer("loss").view(torch.float32))
    assert ours == pytest.approx(loss, rel=min(limit, 1e-3))
    for name, gradient in expected.items():
        error = (found[name].float() - gradient.float()).abs().max() / gradient.float().abs().max()
        assert error <= limit, name


def _by_hf_names(memory: ChainMemory, spec: ModelSpec, kind: str) -> dict[str, torch.Tensor]:
    groups = {"embedding": "embedding", "head": "head"}
    groups |= {str(layer): f"layer.{layer}" for layer in range(spec.num_layers)}
    flats = {flat: memory.buffer(f"{kind}.{group}").cpu() for group, flat in groups.items()}
    return {name: value.clone() for name, value in unpack_hf_state(spec, flats).items()}


def _hf_gradients(spec, weights, memory, chain):
    """Of the first round, by an independent implementation; of a step of two rounds the half."""
    config = LlamaConfig(
        vocab_size=spec.vocab_size, hidden_size=spec.d_model, intermediate_size=spec.d_ff,
        num_hidden_layers=spec.num_layers, num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads, head_dim=spec.head_dim, rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.device(BACKEND), next(iter(weights.values())).dtype)
    model.load_state_dict(weights)
    work = chain.workload
    total = 0.0
    for chunk in range(work.chunks_per_round):
        tokens = memory.buffer(f"tokens.{chunk}").view(torch.int32).view(2, -1, work.seq_len).long()
        logits = model(input_ids=tokens[0]).logits.float().flatten(0, 1)
        losses = torch.nn.functional.cross_entropy(logits, tokens[1].flatten(), reduction="sum")
        loss = losses / work.tokens_per_step
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.cpu() for name, p in model.named_parameters()}


def test_the_process_keeps_the_cap_by_the_drivers_figure():
    chain = chain_of("packed")
    caps = Caps(device_bytes=2 * _GIB, device_reserve_bytes=3 * _GIB // 2)
    schedule = planned(chain, MACHINE, caps, "streaming")
    timeline = run(schedule, RunOptions(backend=BACKEND, num_passes=3))[0].timeline
    memory = timeline.provenance.device_memory
    assert memory is not None
    assert memory.excess_bytes == 0
    assert memory.arena_bytes < memory.peak_bytes <= 2 * _GIB


def test_one_pinned_arena_in_pieces_serves_schedule_after_schedule(monkeypatch):
    chain = chain_of("packed")
    least = enough_device_bytes(chain, "streaming")
    streaming = planned(chain, MACHINE, Caps(device_bytes=least), "streaming")
    resident = planned(chain, MACHINE, Caps(), "resident")
    with MeasuringSession(BACKEND) as session:
        expected = [session.measure(one, 3).losses for one in (streaming, resident)]
    assert expected[0] == expected[1]
    most = arena_bytes(streaming, HOST) * 2 // 3 // 4096 * 4096
    for name in ("MAX_PIECE_BYTES", "_PIECE_SLACK_BYTES"):
        monkeypatch.setattr(measuring, name, most)
    in_pieces = Pinning(torch.cuda.cudart(), max_piece_bytes=most)
    monkeypatch.setattr(measuring, "arena_pinning", lambda: in_pieces)
    with MeasuringSession(BACKEND) as session:
        found = [session.measure(one, 3).losses for one in (streaming, resident, streaming)]
    assert found == [expected[0], expected[1], expected[0]]


@pytest.mark.parametrize("kind", ["plain", "compiled", "fsdp_offload"])
def test_peers_run_and_start_at_the_loss_of_random_weights(kind):
    times = measure_peer(PeerWork(kind, spec_of(), 64, 256), torch.device(BACKEND))
    assert times.loss == pytest.approx(6.24, abs=0.2)  # ln 512
    assert times.device_used_bytes > 0


@pytest.mark.skipif("TWINSTREAM_CAMPAIGN" in os.environ, reason="a campaign runs these tests")
def test_the_campaign_does_every_stage_with_tiny_models(tmp_path):
    command = (
        sys.executable, "-m", "benchmarks.gpu", "--backend", BACKEND, "--size", "tiny",
        "--stage", "probe", "--stage", "cells", "--stage", "peers", "--out", str(tmp_path),
    )  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    table = json.loads((tmp_path / "table.json").read_text())
    cells = [row["cell"] for row in table["cells"]]
    expected = ["tiny S64 offloading", "tiny S64 resident", "tiny S64 resident sdpa_cudnn"]
    assert cells == expected, table["without"]
    assert len(table["peers"]) == 3
    assert table["probe"]["samples"]
