"""Published tables read as jobs; tests/data/clusters has a few rows of each, as published."""

import csv
import json
from pathlib import Path

import pytest

from benchmarks.accuracy.published.published_models import published_shape, weighted_stages
from benchmarks.accuracy.published.reading import read_cluster_table, read_cluster_tables
from benchmarks.accuracy.published.writing import measured_steps_csv
from tests.models.published_configs import META_LLAMA_3_8B
from twinstream.fidelity.cluster_rows import (
    ClusterTableError,
    read_measured_steps,
)
from twinstream.hardware_profiles.clusters.loader import cluster_names
from twinstream.models.presets import load_model
from twinstream.schedule.errors import TwinstreamError

FEW = Path(__file__).parents[2] / "data" / "clusters"
TABLES = sorted(FEW.glob("*_few.csv"))


def rows_of(name):
    return {row.row_id: row for row in read_cluster_table(FEW / f"{name}_few.csv")}


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
def test_a_layout_covers_the_gpus_and_divides_the_batch(table):
    for row in read_cluster_table(table):
        assert row.scored or row.why_not, row.row_id
        if row.job is not None:
            layout = row.job.layout
            assert layout.num_gpus == row.num_gpus
            assert row.job.global_batch % (layout.dp * layout.micro_batch) == 0
            assert row.cluster in cluster_names()


def test_vtrain_names_degrees_and_milliseconds():
    row = rows_of("vtrain")["3B_2_32_1_8"]
    assert (row.job.layout.tp, row.job.layout.dp, round(row.measured_s, 9)) == (2, 32, 3.9752)
    assert (row.job.layout.recompute, row.job.recipe.implementations.attention) == (
        "full", "unfused",
    )  # fmt: skip


def test_the_405b_of_nine_stages_is_even_and_that_of_eight_counts_embedding_and_loss():
    rows = [row for row in rows_of("dgxc").values() if "405b" in row.row_id]
    nine, eight = sorted(rows, key=lambda row: -row.job.layout.pp)
    assert nine.job.layout.stage_layers is None and nine.job.shape.num_kv_heads == 16
    stages = eight.job.layout.stage_layers
    assert (stages[0], stages[1], stages[-1], sum(stages)) == (1, 2, 1, 126)
    assert eight.job.shape.num_kv_heads == 8


def test_mlperf_counts_the_embedding_as_a_layer_too():
    for row in rows_of("mlperf_llama405b").values():
        assert row.job.layout.stage_layers == (1, *[2] * 62, 1)


def test_what_no_shape_here_has_is_kept_and_told():
    why = {row_id: row.why_not for row_id, row in rows_of("dgxc").items() if row.job is None}
    assert len(why) == 2
    assert any("LoRA" in reason for reason in why.values())
    assert any("hybrid_mamba" in reason for reason in why.values())
    papers = [row.why_not for row in rows_of("papers").values() if row.job is None]
    assert len(papers) == 3 and all(papers)


def test_what_a_source_doubts_is_read_and_not_scored():
    doubtful = [row for name in ("dgxc", "mosaicml") for row in rows_of(name).values()
                if row.suspect]  # fmt: skip
    assert len(doubtful) == 2
    assert all(row.job is not None and not row.scored for row in doubtful)


def test_fsdp_shards_over_all_gpus_or_over_a_group():
    (maxtext,) = [row for row in rows_of("dgxc").values() if "maxtext" in row.row_id]
    assert (maxtext.job.layout.zero, maxtext.job.layout.dp, maxtext.job.layout.shard) == (
        3,
        512,
        128,
    )
    grad_op = [row for row in rows_of("mosaicml").values() if "shard_grad_op" in row.row_id]
    assert grad_op[0].job.layout.zero == 2


def test_runs_of_one_configuration_on_more_gpus_are_a_family():
    eight, many = [row for row in rows_of("dgxc").values() if "llama3.1-8b" in row.row_id]
    assert eight.family == many.family and eight.num_gpus != many.num_gpus


def test_a_shape_has_the_parameters_that_its_table_prints():
    # mosaicml: mpt-125m of 124,131,840 parameters at 512 tokens
    shape = published_shape("mpt-125m", 512)
    width, layers = shape.d_model, shape.num_layers
    matrices = layers * 12 * width**2
    biases = layers * 9 * width
    norms = (2 * layers + 1) * 2 * width
    assert (shape.vocab_size + 512) * width + matrices + biases + norms == 124_131_840


def test_layers_are_weighed_only_where_they_come_out_even():
    assert weighted_stages(126, 64) == (1, *[2] * 62, 1)
    assert weighted_stages(96, 8) is None


def test_columns_that_are_missing_are_named(tmp_path):
    text = (FEW / "vtrain_few.csv").read_text().replace("measured_ms", "took")
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ClusterTableError, match=r"lacks measured_ms"):
        read_cluster_table(tmp_path / "t.csv")


@pytest.mark.parametrize(
    ("text", "told"),
    [("", "is empty"), ("a,b\n", "nearest"), ("a,b\n1\n", "1 values for 2 columns")],
)
def test_what_is_no_table_is_told_in_one_sentence(tmp_path, text, told):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ClusterTableError, match=told):
        read_cluster_table(tmp_path / "t.csv")


def test_a_cell_that_is_no_number_is_told_with_its_line(tmp_path):
    text = (FEW / "vtrain_few.csv").read_text().replace(",3975.2", ",fast")
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ClusterTableError, match="line 3: measured_ms is 'fast'"):
        read_cluster_table(tmp_path / "t.csv")


def test_several_tables_are_one_after_the_other():
    rows = read_cluster_tables(TABLES)
    assert len(rows) == sum(len(read_cluster_table(table)) for table in TABLES)


def test_every_published_row_reads_as_it_was_written(tmp_path):
    rows = read_cluster_tables(TABLES)
    (tmp_path / "steps.csv").write_text(measured_steps_csv(rows))
    assert read_measured_steps([tmp_path / "steps.csv"]) == rows


def test_a_table_needs_seven_columns_and_takes_presets_and_files(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(META_LLAMA_3_8B))
    header = "row,gpu,num_gpus,cluster,model,seq_len,global_batch,layout,step_time_s"
    lines = ["a,H100,16,h100_dgx,llama3-8b,4096,32,tp=8 dp=2 zero=1,1.5",
             "b,H100,16,h100_dgx,mine,4096,32,tp=8 dp=2 sequence_parallel=false,"]  # fmt: skip
    (tmp_path / "t.csv").write_text("\n".join([header, *lines]))
    first, second = read_measured_steps([tmp_path / "t.csv"])
    assert first.job.shape == load_model("8b") and first.measured_s == 1.5 and first.scored
    assert second.job.shape.name == "mine" and second.measured_s is None
    assert (first.job.layout.tp, second.job.layout.sequence_parallel) == (8, False)


@pytest.mark.parametrize(
    ("row", "told"),
    [("a,H100,16,h100_dgx,9b,4096,32,", "unknown model '9b'"),
     ("a,H100,16,h100_dgx,8b,4096,32,tp", "layout has 'tp', and needs name=value"),
     ("a,H100,16,h100_dgx,8b,4096,32,tq=2", "line 2: layout.tq|line 2: tq"),
     ("a,H100,many,h100_dgx,8b,4096,32,", "num_gpus is 'many'"),
     ("a,H100,16,h100_dgx,8b,4096,32,,scaling,s,two", "line 2: rank: .*integer")],
)  # fmt: skip
def test_a_cell_that_cannot_be_is_told_in_one_sentence(tmp_path, row, told):
    header = "row,gpu,num_gpus,cluster,model,seq_len,global_batch,layout,comparison,set,rank"
    cells = row.split(",")
    cells += [""] * (len(header.split(",")) - len(cells))
    (tmp_path / "t.csv").write_text(f"{header}\n{','.join(cells)}\n")
    with pytest.raises(TwinstreamError, match=told):
        read_measured_steps([tmp_path / "t.csv"])


def test_a_configuration_of_megatron_bridge_is_one_row_of_the_mean_speed_of_its_releases():
    rows = rows_of("megatron_bridge")
    (dense,) = [row for name, row in rows.items() if name.startswith("LLAMA3_8B")]
    assert dense.measured_s == pytest.approx(128 * 8192 / 8 / ((14451 + 14079) / 2))
    assert dense.note == "mean of 25.09, 25.11" and dense.job.layout.zero == 3
    (experts,) = [row for name, row in rows.items() if "235B" in name]
    layout = experts.job.layout
    assert (layout.ep, layout.etp, layout.tp, layout.expert_replicas) == (32, 1, 2, 16)
    assert not layout.tp_overlap and experts.job.recipe.implementations.matmuls == "fp8"
    (nvfp4,) = [row for name, row in rows.items() if " fp4 " in name]
    assert nvfp4.job.layout.stage_layers[:2] == (1, 2) and nvfp4.job.layout.tp_overlap
    why = sorted(row.why_not for row in rows.values() if row.why_not)
    assert len(why) == 2 and "LoRA" in why[0] and "drop tokens" in why[1]
    (kimi,) = [row for name, row in rows.items() if name.startswith("Kimi_K2")]
    assert kimi.job.layout.stage_layers == (*[4] * 15, 1) and not kimi.recompute_stated


def test_deepseek_has_a_layer_more_where_it_predicts_further_and_full_stages_first(tmp_path):
    """By the model FLOPs that are printed: 260 GFLOP a token, and 249.6 without."""
    table = tmp_path / "megatron_bridge.csv"
    with (FEW / "megatron_bridge_few.csv").open(encoding="utf-8", newline="") as file:
        first, *_ = csv.DictReader(file)
    told = first | {
        "model": "DeepSeekV3", "mode": "pretrain", "precision": "MXFP8", "system": "GB200",
        "gpus": "256", "global_batch": "4096", "micro_batch": "1", "seq_len": "4096", "fsdp": "0",
        "tp": "1", "pp": "4", "cp": "1", "vp": "4", "ep": "64",
    }  # fmt: skip
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, told.keys())
        writer.writeheader()
        writer.writerows([told | {"note": ""}, told | {"note": "w/o MTP"}])
    further, without = read_cluster_tables([table])
    assert further.job is not None and without.job is not None
    assert further.job.layout.stage_layers == (*[4] * 15, 2)
    assert without.job.layout.stage_layers == (*[4] * 15, 1)
    assert further.family != without.family


def test_tp_overlap_experts_tp_and_their_load_are_read_of_the_recipes():
    rows = [row.job.layout for row in rows_of("dgxc").values() if row.job is not None]
    assert {(one.tp > 1 and one.zero == 1, one.tp_overlap) for one in rows} <= {
        (True, True), (False, False),
    }  # fmt: skip
    zero3 = [row for row in rows_of("papers").values() if row.series.endswith("ZeRO-3")]
    assert {row.cluster for row in zero3} == {"a100_deepspeed"}
