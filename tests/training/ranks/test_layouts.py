"""The layout of a run on ranks: chosen by prediction, told with its reasons, or refused."""

from pathlib import Path
from typing import Any

import pytest

from tests.training.ranks.rank_runs import rank_options
from tests.training.small_runs import write_config
from twinstream.clusters.shared_machine import place_here, rank_machine, share_of_cores
from twinstream.commands.output import screen
from twinstream.commands.runs.train_screen import predicted_json, train_screen
from twinstream.models.layouts.layout import LayoutError
from twinstream.schedule.errors import TwinstreamError
from twinstream.training.options import TrainOptions
from twinstream.training.preparing import Prepared
from twinstream.training.ranks.planning import workloads_of
from twinstream.training.trainer import Trainer


def prepared(wanted: TrainOptions) -> Prepared:
    """All but the training."""
    return Trainer(wanted).prepare()


def test_the_fastest_layout_of_all_is_chosen_and_the_others_are_told(tmp_path: Path) -> None:
    found = prepared(rank_options(tmp_path, ranks=4))
    looked_at = found.plan.candidates
    degrees = {(c.layout.tp, c.layout.pp, c.layout.dp) for c in looked_at}
    assert degrees >= {(1, 4, 1), (1, 2, 2), (1, 1, 4)}
    assert {tp for tp, _, _ in degrees} > {1}
    rates = {c.layout: c.tokens_per_s or 0.0 for c in looked_at if not c.is_bound}
    assert rates[found.plan.layout] == max(rates.values()) == found.plan.tokens_per_s
    console = screen()
    with console.capture() as capture:
        console.print(train_screen(found, 0))
    shown = " ".join(capture.get().split())
    assert f"the fastest of {len(looked_at)} that were looked at" in shown
    assert "gloo over loopback" in shown and not (tmp_path / "run").exists()
    assert len(predicted_json(found)["candidates"]) == len(looked_at)  # type: ignore[arg-type]


def test_what_is_given_of_a_layout_is_taken(tmp_path: Path) -> None:
    found = prepared(rank_options(tmp_path, ranks=4, pp=2, tp=1, pipeline="gpipe"))
    layout = found.plan.layout
    assert (layout.pp, layout.dp, layout.pipeline) == (2, 2, "gpipe")
    assert len(found.plan.candidates) == 1
    assert found.plan.chunks_of_a_replica == 4 and found.plan.workload.rounds_per_step == 8


def test_the_library_sums_gradients_where_it_is_asked_to(tmp_path: Path) -> None:
    found = prepared(rank_options(tmp_path, ranks=2, dp=2, reduction="library")).plan
    ops = found.schedule.schedules["stage 0"].ops
    assert {op.reduction for op in ops if op.op_id.startswith("reduce.")} == {"library"}  # type: ignore[union-attr]


def test_a_cap_of_each_rank_leaves_out_what_does_not_fit(tmp_path: Path) -> None:
    wanted = rank_options(tmp_path, ranks=2)
    whole = max(one for one in _arenas(prepared(wanted)))
    with pytest.raises(LayoutError, match=r"no layout of 2 ranks can train this: pp2 .*; dp2"):
        prepared(wanted.model_copy(update={"device_mem": str(whole // 50)}))


def test_replicas_that_do_not_fit_whole_are_sharded(tmp_path: Path) -> None:
    model = write_config(tmp_path / "wide", num_layers=4, vocab_size=60_000)
    wanted = rank_options(tmp_path, ranks=2, dp=2, host_mem="64KiB", model=str(model))
    whole = prepared(wanted).plan
    found = prepared(wanted.model_copy(update={"device_mem": "80MiB"})).plan
    assert whole.layout.zero < 2 and found.layout.zero == 3
    assert ["fit" in one.why_not for one in found.candidates] == [True, True, True, False]
    assert 1.0 <= found.checkpoint_bytes / whole.checkpoint_bytes < 1.2  # small groups are padded


def _arenas(found: Prepared) -> list[int]:
    memory: Any = predicted_json(found)["memory_bytes"]
    return [one["device"] for one in memory.values()]


def test_a_step_has_rounds_enough_for_a_pipeline(tmp_path: Path) -> None:
    wanted = rank_options(tmp_path, ranks=4, chunk_tokens=None, chunks_per_round=None)
    found = prepared(wanted)
    told = (wanted, found.here, found.model.spec, found.recipe, found.data)
    assert [(one.chunk_tokens, one.rounds_per_step) for one in workloads_of(*told)] == [
        (64, 8), (512, 1), (256, 2), (128, 4)
    ]  # fmt: skip
    work = found.plan.workload
    assert work.tokens_per_step == 512 and work.rounds_per_step >= found.plan.layout.dp
    open_step = wanted.model_copy(update={"tokens_per_step": None, "steps": None})
    found = prepared(open_step)
    told = (open_step, found.here, found.model.spec, found.recipe, found.data)
    assert workloads_of(*told)[0].rounds_per_step % 8 == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"policy": "streaming"}, "policy 'streaming'"),
        ({"recompute": "full"}, "recompute"),
        ({"pp": 3}, "pp 3 are 3 ranks, and there are 2"),
        ({"pp": 2, "dp": 2}, "pp 2 x dp 2 are 4 ranks, and there are 2"),
        (
            {"virtual_stages": 2, "pipeline": "gpipe"},
            "'gpipe' has no virtual stages: 2 a rank need 'interleaved' or 'ring'",
        ),
        ({"ranks": 16, "pp": 16}, "4 layers are fewer than pp x virtual_stages = 16 x 1 stages"),
        ({"dp": 2, "tokens_per_step": 192}, "batch 3 is not divisible by dp 2"),
    ],
)
def test_what_ranks_cannot_do_is_refused_before_anything_is_written(
    tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(TwinstreamError, match=message):
        prepared(rank_options(tmp_path, **({"ranks": 2} | given)))
    assert not (tmp_path / "run").exists()


def test_sequences_that_do_not_fit_whole_are_cut_into_slices(tmp_path: Path) -> None:
    long = {"seq_len": 512, "tokens_per_step": 2048, "chunk_tokens": None, "host_mem": "64KiB"}
    wanted = rank_options(tmp_path, ranks=2, pp=2, **long)
    whole = prepared(wanted.model_copy(update={"chunk_tokens": 512}))
    assert whole.plan.pieces == 1
    cap = max(_arenas(whole)) // 3
    with pytest.raises(LayoutError, match="no layout of 2 ranks"):
        prepared(wanted.model_copy(update={"device_mem": str(cap), "chunk_tokens": 512}))
    found = prepared(wanted.model_copy(update={"device_mem": str(cap)}))
    work = found.plan.workload
    assert found.plan.pieces > 1 and work.chunk_tokens * found.plan.pieces == 512
    assert work.tokens_per_step == whole.plan.tokens_per_step and max(_arenas(found)) <= cap


def test_ranks_share_the_cores(tmp_path: Path) -> None:
    machine = prepared(rank_options(tmp_path, ranks=2)).here.machine
    assert rank_machine(machine, 2, 2) is machine
    half = rank_machine(machine, 4, 2)
    assert half.number("hbm_bytes_per_s") == machine.number("hbm_bytes_per_s") / 2
    assert share_of_cores(8, 2) == 0.25 and share_of_cores(1, 2) == 1.0
    assert place_here(machine, 4, 2).machine == half
    assert place_here(machine, 4, 2).cluster.count("gpus_per_node") == 4
