"""Results as a notebook shows them and as data frames; the notebook of examples runs."""

import ast
import json
from pathlib import Path

import pytest

import twinstream as ts

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def planned():
    schedule = ts.plan("tiny", "cpu", step=ts.TrainingStep(64, 256), device_mem="6MiB")
    return schedule, ts.simulate(schedule, "cpu")


def test_the_notebook_of_examples_runs_and_each_cell_shows_something():
    cells = json.loads((EXAMPLES / "a_step.ipynb").read_text("utf-8"))["cells"]
    known: dict[str, object] = {}
    shown = []
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        *before, last = ast.parse("".join(cell["source"])).body
        exec(compile(ast.Module(before, []), "a_step", "exec"), known)
        assert isinstance(last, ast.Expr)
        shown.append(eval(compile(ast.Expression(last.value), "a_step", "eval"), known))
    html = [one._repr_html_() for one in shown if hasattr(one, "_repr_html_")]
    assert "Schedule of 1b on rtx4090" in html[0] and "64.00 GiB of host memory" in html[0]
    assert "Timeline simulated on rtx4090" in html[1]
    assert len(html) >= 6, "pandas and plotly show themselves, too"
    assert shown[-1] > 1.02, "a faster link makes a step faster that is limited by it"


def test_a_frame_has_a_row_for_each_op_and_its_times(planned):
    schedule, timeline = planned
    rows = ts.frame(schedule, timeline)
    assert list(rows.op_id) == [op.op_id for op in schedule.ops]
    assert list(rows.end_ns) == list(timeline.passes[-1].end_ns)
    copies = rows[rows.kind == "copy"]
    sizes = {tensor.tensor_id: tensor.size_bytes for tensor in schedule.tensors}
    assert [int(size) for size in copies.size_bytes] == [sizes[name] for name in copies.tensor]
    one = rows.iloc[3]
    assert timeline.span_ns(one.op_id) == (one.start_ns, one.end_ns)


def test_what_has_no_rows_or_belongs_to_another_schedule_is_refused(planned):
    _, timeline = planned
    other = ts.plan("tiny", "cpu", step=ts.TrainingStep(64, 256), policy="resident")
    with pytest.raises(ts.TwinstreamError, match="a Machine has no rows"):
        ts.frame(ts.load_machine("cpu"))
    with pytest.raises(ts.TwinstreamError, match="not the first's"):
        ts.frame(other, timeline)
    with pytest.raises(ts.TwinstreamError, match="no op 'embed'"):
        timeline.span_ns("embed")


def test_answers_cells_sweeps_and_layouts_have_rows_and_tables(tmp_path):
    asked = ts.query(model="tiny", machine="cpu", seq_len=64, tokens_per_step=256)
    answer = asked.answer()
    assert ts.frame(answer).step_time_s[0] == answer.step_s
    assert "+/-" in answer._repr_html_()
    swept = ts.sweep(
        {"fixed": {"model": "tiny", "machine": "cpu", "tokens_per_step": 256},
         "axes": {"seq_len": [64, 128]}}, tmp_path, num_jobs=1,
    )  # fmt: skip
    assert list(ts.frame(swept).seq_len) == ["64", "128"]
    assert "<th" in swept._repr_html_() and "seq_len" in swept._repr_html_()
    question = ts.FitQuestion("tiny", ("rtx4090",), lengths=(64,), tokens_per_step=256)
    table = ts.fit(question, effort="quick")
    assert set(ts.frame(table).machine) == {"rtx4090"}
    assert "full" in table._repr_html_()


def test_names_of_the_package_are_only_the_public_ones():
    assert set(dir(ts)) == {*ts.__all__, "__version__"}
