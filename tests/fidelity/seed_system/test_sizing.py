"""The seed system's plans, against what it recorded of them."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from twinstream.fidelity.seed_system.classes import UnknownMachineClass, machine_class
from twinstream.fidelity.seed_system.levels import Levels, choose_levels
from twinstream.fidelity.seed_system.sizing import (
    Sizing,
    SizingRefused,
    UnknownTarget,
    size_step,
    sizes_of_round,
)
from twinstream.models.presets import load_preset
from twinstream.models.providers.flops import SavedLevel

GIB = 2**30
TABLE = Path(__file__).parents[2] / "data" / "ml_dataflow_plans.csv"


def recorded() -> list[dict[str, str]]:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def sized(row: dict[str, str]) -> Sizing:
    rule = "v1" if row["rounds_rule"] == "v1" else "v2"
    return size_step(
        load_preset(row["model"].lower()),
        int(row["seq_len"]),
        machine_class(row["machine"]),
        host_bytes=int(row["host_mem_gib"]) * GIB,
        device_bytes=int(row["dev_mem_gib"]) * GIB,
        rounds=rule,
    )


def told(row: dict[str, str]) -> str:
    columns = ("machine", "model", "seq_len", "host_mem_gib", "dev_mem_gib")
    return " ".join(row[name] for name in columns)


def test_every_recorded_plan_is_reproduced():
    wrong = []
    for row in (r for r in recorded() if r["status_detail"] == "ok"):
        plan = sized(row)
        found = {
            "chunk_size": plan.chunk_tokens,
            "chunks_per_round": plan.chunks_per_round,
            "rounds_per_step": plan.rounds_per_step,
            "home_acts": plan.home_acts,
            "dev_acts": plan.device_acts,
            "actual_inp_only": plan.count(SavedLevel.INPUT),
            "actual_inp_attn": plan.count(SavedLevel.ATTENTION),
            "actual_full": plan.count(SavedLevel.FULL),
            "dev_param_blocks": plan.param_blocks,
            "dev_grad_blocks": plan.grad_blocks,
        }
        wrong += [(told(row), key) for key, value in found.items() if value != int(row[key])]
    assert wrong == []


def test_recorded_memory_is_met_to_a_thousandth_of_a_gib():
    for row in (r for r in recorded() if r["status_detail"] == "ok"):
        plan = sized(row)
        host, device = plan.used_host_bytes / GIB, plan.used_device_bytes / GIB
        assert host == pytest.approx(float(row["used_host_mem_gib"]), abs=1e-3), told(row)
        assert device == pytest.approx(float(row["used_dev_mem_gib"]), abs=1e-3), told(row)


def test_failed_cells_are_refused_for_the_recorded_reason():
    failed = [r for r in recorded() if r["status_detail"] != "ok"]
    assert {r["status_detail"] for r in failed} == {"failed_dev_mem", "failed_host_mem"}
    for row in failed:
        with pytest.raises(SizingRefused) as refused:
            sized(row)
        assert refused.value.reason == row["status_detail"], told(row)


def test_rounds_that_are_given_are_taken():
    row = next(r for r in recorded() if r["status_detail"] == "ok")
    spec, machine = load_preset(row["model"].lower()), machine_class(row["machine"])
    plan = size_step(
        spec, 512, machine, host_bytes=64 * GIB, device_bytes=64 * GIB, rounds=17
    )  # fmt: skip
    assert plan.rounds_per_step == plan.workload.rounds_per_step == 17


def test_rule_v1_knows_two_models_only():
    with pytest.raises(UnknownTarget, match="15b"):
        size_step(
            load_preset("15b"), 8192, machine_class("h100"), host_bytes=400 * GIB,
            device_bytes=70 * GIB, rounds="v1",
        )  # fmt: skip


def test_rule_v2_keeps_the_adam_state_at_two_percent():
    spec, machine = load_preset("8b"), machine_class("a100")
    plan = size_step(spec, 8192, machine, host_bytes=200 * GIB, device_bytes=60 * GIB)
    state_s = 4 * spec.num_block_parameters * 32 / (0.75 * 32 * GIB)
    flops = 6 * (spec.num_block_parameters - 2 * 4096) * 32 + 6 * 4096 * 128256
    attention = 32 * 6 * 8192 * 4096
    round_s = (flops + attention) * 16384 / (0.6 * 312e12)
    assert plan.rounds_per_step == round(state_s / 0.02 / round_s)


def test_a_class_is_known_by_the_beginning_of_a_name():
    assert machine_class("RTX 3090").name == "rtx3090"
    assert machine_class("h100_fitted").name == "h100"
    with pytest.raises(UnknownMachineClass, match="tpu"):
        machine_class("tpu")


def test_a_step_longer_than_the_least_chunk_is_cut_into_divisors():
    machine = replace(machine_class("h100"), min_chunk_tokens=1000)
    cut = sizes_of_round(load_preset("8b"), 3600, machine)
    assert (cut.chunk_tokens, cut.chunks_per_round) == (1200, 3)
    packed = sizes_of_round(load_preset("8b"), 300, machine)
    assert (packed.chunk_tokens, packed.sequences_per_chunk) == (1200, 4)


def few_levels(*, slots: int, chunks: int = 1, window_bytes: float | None = None) -> Levels:
    sizes = {SavedLevel.INPUT: 1, SavedLevel.ATTENTION: 2, SavedLevel.FULL: 10}
    return Levels(8, chunks, slots, sizes, window_bytes)


def initials(levels: tuple[SavedLevel, ...]) -> str:
    return "".join(level.name[0] for level in levels)


def test_full_ones_take_their_place_in_windows_by_turns():
    # 4 of 9 fit FULL: one for each of three windows of three; integer division loses the fourth.
    assert initials(choose_levels(few_levels(slots=3), 9, 2 * 9 + 8 * 4)) == "AAFFAAAAF"
    # 5 of 8: two for each of two windows, and one in what is left over.
    assert initials(choose_levels(few_levels(slots=3), 8, 2 * 8 + 8 * 5)) == "AFFFFAFA"


def test_inputs_are_the_earliest_chunks_of_whole_layers():
    # 7 activations at home in layers of 3: the last layer is not wholly there.
    assert initials(choose_levels(few_levels(slots=1, chunks=3), 7, 7 + 4)) == "IIAIAAA"


def test_a_window_takes_no_more_than_the_link():
    # 2 x 2 bytes of ATTENTION and one step of 8 to FULL in 12; what is left over is free.
    chosen = choose_levels(few_levels(slots=2, window_bytes=13.0), 5, 1000)
    assert initials(chosen) == "AFFAF"
    assert initials(choose_levels(few_levels(slots=2, window_bytes=3.0), 5, 1000)) == "AAAAA"


def test_a_plan_that_the_host_limits_more_is_not_spread_anew():
    # Three fit the host: one in each of two windows, the third left over. The link allows as many.
    levels = few_levels(slots=4, window_bytes=8.0 + 8.0 * 2)
    assert initials(choose_levels(levels, 9, 2 * 9 + 8 * 3)) == "AAAFFAAAF"
    # Of eight that fit, the link leaves two to each window and the one left over.
    assert initials(choose_levels(levels, 9, 2 * 9 + 8 * 8)) == "AAFFFFAAF"


def least_gib(model: str, seq_len: int, machine: str) -> tuple[int, int]:
    """The least device cap that runs, and the least host cap at that."""
    spec, constants = load_preset(model), machine_class(machine)

    def runs(device_gib: int, host_gib: int) -> bool:
        caps = {"host_bytes": host_gib * GIB, "device_bytes": device_gib * GIB}
        try:
            size_step(spec, seq_len, constants, **caps)
        except SizingRefused:
            return False
        return True

    device = next(gib for gib in range(8, 80) if runs(gib, 4000))
    return device, next(gib for gib in range(5, 500) if runs(device, gib))


@pytest.mark.parametrize(
    ("machine", "model", "device_gib", "host_gib"),
    [
        ("h100", "1b", (16, 16), 10),
        ("h100", "8b", (23, 23), 61),
        ("h100", "15b", (23, 23), 119),
        ("h100", "32b", (33, 33), 250),
        ("rtx5090", "1b", (11, 11), 9),
        ("rtx5090", "8b", (17, 18), 57),
        ("rtx5090", "15b", (17, 18), 112),
        ("rtx5090", "32b", (24, 25), 243),
    ],
)
def test_the_least_memory_is_what_is_told_of_machines_without_a_table(
    machine, model, device_gib, host_gib
):
    """shared/data/README.md, section 2.5: sequences of up to 8,192 tokens, caps in whole GiB."""
    assert least_gib(model, 512, machine) == (device_gib[0], host_gib)
    assert least_gib(model, 8192, machine) == (device_gib[1], host_gib)


def test_the_least_memory_grows_with_the_length_as_told():
    found = [least_gib("8b", seq_len, "h100")[0] for seq_len in (32768, 131072, 524288)]
    assert found == [24, 27, 39]


def test_adam_state_takes_the_place_of_all_that_is_laid_out_after_the_activation_slots():
    """8B, 8,192 tokens, 70 and 30 GiB: 29.7788 GiB recorded as used, 5 slots of activations.

    Behind the slots lie an activation's gradients, two recomputed norms, the head's norm, logits
    and their gradients. A layer's Adam state is two tensors of 218,112,000 bf16 numbers.
    """
    plan = size_step(
        load_preset("8b"), 8192, machine_class("h100"), host_bytes=70 * GIB, device_bytes=30 * GIB
    )
    tokens, d_model, vocabulary, act = 16384, 4096, 128256, 16384 * 94344
    head = tokens * (2 * d_model + 4) + 2 * tokens * vocabulary * 2
    kept = 29.7788 * GIB - 5 * act - act - 2 * tokens * d_model * 2 - head
    assert plan.num_optimizer_blocks == (30 * GIB - kept) // (2 * 2 * 218_112_000)
