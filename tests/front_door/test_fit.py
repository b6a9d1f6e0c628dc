"""`fit`: what cards can do with a model."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import twinstream as ts
from tests.data.samples import lines_of, loaded, paragraphs, tokenizer_folder
from tests.front_door.command_line import call
from tests.training.small_runs import write_config, write_rows
from twinstream.commands.fit import FitOptions, lengths_of, prices_by_machine
from twinstream.schedule.document import Caps, Schedule
from twinstream.study.fit.cells import FitCell, FitQuestion, FitTable, ways
from twinstream.study.fit.screen import fit_screen

CPU = ("--machine", "cpu", "--backend", "cpu")
STEP = ("--tokens-per-step", 2048, "--seq-len", "512,1k", "--jobs", 1, "--effort", "quick")


def test_a_cell_says_what_plan_says(tmp_path: Path) -> None:
    told = call("fit", "tiny", "--machine", "cpu", "--machine", "rtx4090", *STEP, "--json")
    assert told.code == 0, told.err
    cells = json.loads(told.out)["cells"]
    assert len(cells) == 2 * len(ways()) * 2
    assert [cell["machine"] for cell in cells] == ["cpu"] * 10 + ["rtx4090"] * 10
    nf4 = next(c for c in cells if c["way"] == "LoRA, base in nf4" and c["seq_len"] == 1024)
    plan = call(
        "plan", "--model", "tiny", "--machine", "cpu", "--seq-len", 1024, "--tokens-per-step", 2048,
        "--lora", "r=16", "--base", "nf4", "--effort", "quick", "--json",
        "-o", tmp_path / "plan.json",
    )  # fmt: skip
    assert plan.code == 0, plan.err
    schedule = Schedule.model_validate_json((tmp_path / "plan.json").read_text())
    machine = ts.load_machine("cpu")
    summary = ts.summarize(schedule, ts.simulate(schedule, machine), machine)
    assert nf4["tokens_per_s"] == pytest.approx(summary.tokens_per_s, rel=1e-9)
    assert nf4["device_bytes"] == summary.device_peak_bytes
    assert "--lora r=16 --base nf4 --seq-len 1024 --tokens-per-step 2048" in nf4["command"]
    sizes = {cell["way"]: cell["checkpoint_bytes"] for cell in cells}
    assert sizes["full"] > sizes["full, 8-bit optimizer"] > sizes["LoRA"]


def test_updates_may_be_the_hosts_as_plan_has_them() -> None:
    asked = ("--machine", "rtx4090", "--seq-len", 512, "--tokens-per-step", 512)
    host = ("--optimizer", "host", "--host-mem", "1GiB")
    told = call("fit", "tiny", *asked, *host, "--jobs", 1, "--json")
    assert told.code == 0, told.err
    cell = next(one for one in json.loads(told.out)["cells"] if one["way"] == "full")
    plan = call("plan", "--model", "tiny", *asked, *host, "--effort", "quick", "--json").json()
    assert plan["recipe"]["optimizer"] == "host"
    assert cell["tokens_per_s"] == pytest.approx(plan["tokens_per_s"], rel=1e-9)
    assert cell["command"].endswith("--optimizer host --max-grad-norm 0")
    assert cell["plan_command"].endswith("--optimizer host")


def test_several_gpus_have_columns_of_their_own_as_plan_says() -> None:
    asked = ("--machine", "cpu", "--seq-len", 512, "--tokens-per-step", 4096)
    told = call("fit", "tiny", *asked, "--gpus", "1,2", "--jobs", 1, "--json")
    assert told.code == 0, told.err
    cells = [cell for cell in json.loads(told.out)["cells"] if cell["way"] == "full"]
    assert [(cell["gpus"], bool(cell["layout"])) for cell in cells] == [(1, False), (2, True)]
    both = cells[1]
    plan = call("plan", "--model", "tiny", *asked, "--ranks", 2, "--json").json()
    assert both["tokens_per_s"] == plan["predicted"]["tokens_per_s"]
    assert both["device_bytes"] == plan["predicted"]["device_peak_bytes"]
    assert "--ranks 2" in both["command"] and "--gpus 2" in both["plan_command"]
    shown = call("fit", "tiny", *asked, "--gpus", "1,2", "--jobs", 1).out
    assert "cpu, 2 GPUs, within" in shown and both["layout"] in shown
    assert "numbers of 1 to 64" in call("fit", "tiny", *asked, "--gpus", "2,x").err


def test_a_loss_of_pairs_is_planned_as_plan_does(tmp_path: Path) -> None:
    rows, dpo = tmp_path / "pairs.jsonl", ("--loss", "dpo,beta=0.3")
    pair = {"prompt": "What is it?", "chosen": "A good answer. " * 9, "rejected": "A bad one. " * 9}
    rows.write_text("\n".join([json.dumps(pair)] * 50))
    told = call(
        "fit", "tiny", rows, "--tokenizer", "bytes", "--machine", "cpu", *STEP, *dpo, "--json"
    )
    assert told.code == 0, told.err
    found = json.loads(told.out)
    cells = {(c["seq_len"], c["is_own"]): c for c in found["cells"] if c["way"] == "full"}
    assert set(cells) == {(512, False), (1024, False), (256, True)}
    plan = call(
        "plan", "--model", "tiny", "--machine", "cpu", "--seq-len", 512, "--tokens-per-step", 2048,
        *dpo, "--effort", "quick", "--json",
    )  # fmt: skip
    planned = json.loads(plan.out)["tokens_per_s"]
    assert cells[512, False]["tokens_per_s"] == pytest.approx(planned, rel=1e-9)
    assert "--loss dpo,beta=0.3 --seq-len 512" in cells[512, False]["command"]
    assert all(cell["tokens_per_s"] and cell["hours"] for cell in cells.values())
    without = call("fit", "tiny", rows, "--tokenizer", "bytes", "--machine", "cpu", *STEP)
    assert without.code == 2 and "--loss dpo" in without.err
    screen = call("fit", "tiny", rows, "--tokenizer", "bytes", "--machine", "cpu", *STEP, *dpo)
    assert "tiny, --loss dpo,beta=0.3" in screen.out
    assert "without the reference's forward pass" in screen.out
    wrong = call("fit", "tiny", "--machine", "cpu", *STEP, "--loss", "mine.py:loss")
    assert wrong.code == 2 and "only dpo is asked about" in wrong.err


def test_what_does_not_fit_lacks_what_the_bound_says() -> None:
    caps = ("--device-mem", "6MiB", "--host-mem", "2MiB")
    told = call("fit", "tiny", "--machine", "cpu", *STEP, *caps, "--json")
    cells = {c["way"]: c for c in json.loads(told.out)["cells"] if c["seq_len"] == 512}
    lacks = {way: cell["lacking_device_bytes"] for way, cell in cells.items()}
    assert all(cell["tokens_per_s"] is None for cell in cells.values())
    assert lacks["full"] > lacks["LoRA"] > lacks["LoRA, base in 8 bits"]
    assert lacks["LoRA, base in 8 bits"] > lacks["LoRA, base in nf4"] > 0
    less = str((6 << 20) + lacks["full"] - (64 << 10))  # than the least
    caps_now = ("--device-mem", less, *caps[2:])
    again = call("fit", "tiny", "--machine", "cpu", *STEP, *caps_now, "--json")
    cells = {c["way"]: c for c in json.loads(again.out)["cells"] if c["seq_len"] == 512}
    assert cells["full"]["lacking_device_bytes"] == pytest.approx(64 << 10, abs=1024)
    assert cells["LoRA, base in nf4"]["tokens_per_s"] > 0
    screen = call("fit", "tiny", "--machine", "cpu", *STEP, *caps)
    assert "more device" in screen.out and "lacks at least so much of one memory" in screen.out


def test_data_has_hours_money_and_lengths_of_its_own(tmp_path: Path) -> None:
    rows, page = write_rows(tmp_path / "rows.jsonl", 200), tmp_path / "fit.html"
    given = (
        "fit",
        "tiny",
        rows,
        "--tokenizer",
        "bytes",
        "--machine",
        "cpu",
        *STEP,
        "--price",
        "cpu=0.5",
    )
    told = call(*given, "--json")
    assert told.code == 0, told.err
    found = json.loads(told.out)
    own = [cell for cell in found["cells"] if cell["is_own"]]
    assert len(own) == len(ways()) and {cell["seq_len"] for cell in own} == {256}
    for cell in found["cells"]:
        hours = found["dataset_tokens"] / cell["tokens_per_s"] / 3600
        assert cell["hours"] == pytest.approx(hours) and cell["money"] == pytest.approx(hours / 2)
    screen = call(*given, "-o", page)
    assert "the data's, to 256" in screen.out and str(rows) in screen.out
    text = page.read_text()
    assert "What can a card do with tiny?" in text and "--base nf4" in text


def test_data_is_opened_as_train_opens_it(tmp_path: Path) -> None:
    """With a tokenizer, its tokens; bytes only where they are asked for, which the screen says."""
    rows, folder = tmp_path / "rows.jsonl", tokenizer_folder(tmp_path / "tokenizer")
    texts = paragraphs()[:20]
    rows.write_text(lines_of([{"body": text} for text in texts]))
    write_config(tmp_path / "m")

    def question(tokenizer: Path) -> FitQuestion:
        how = FitOptions(machine=("cpu",), seq_len="512", tokenizer=tokenizer, columns="text=body")
        return how.question("tiny", [str(rows)])

    refused = call("fit", "tiny", rows, "--machine", "cpu")
    assert refused.code == 2 and "--tokenizer FOLDER" in refused.err and "bytes" in refused.err
    refused = call("fit", tmp_path / "m", rows, "--machine", "cpu")
    train = call("train", tmp_path / "m", rows, "-o", tmp_path / "run", "--dry-run", *CPU)
    why = refused.err.splitlines()[-1]
    assert "m has no tokenizer.json" in why and why == train.err.splitlines()[-1]
    bytes_ = question(Path("bytes"))
    assert bytes_.dataset_tokens == sum(len(text.encode()) for text in texts)
    asked = question(folder)
    tokens = sum(len(one.ids) + 1 for one in loaded(folder).encode_batch(texts))  # an end token
    assert asked.dataset_tokens == tokens and not asked.counts_bytes
    assert asked.data == f"{rows} --tokenizer {folder} --columns text=body"
    told = FitTable(
        model="tiny", tokens_per_step=1, dataset_tokens=9, counts_bytes=bytes_.counts_bytes,
        cells=(), peaks={}, caps={},
    )  # fmt: skip
    assert "data of 9 tokens, each of one byte (--tokenizer bytes)" in shown(told)


def shown(found: FitTable) -> str:
    console = Console(width=100, record=True, file=StringIO())
    console.print(fit_screen(found))
    return console.export_text()


def test_a_table_fills_in() -> None:
    """Of two lengths one is planned: the other has dots."""
    question = FitQuestion("tiny", ("rtx4090",), (1,), (512, 1024), 2048)
    tables: list[FitTable] = []
    ts.fit(question, effort="quick", on_table=tables.append)
    assert "..." in shown(tables[2]) and "..." not in shown(tables[-1])


def test_cells_come_quickly_first_and_get_no_worse() -> None:
    seen: list[FitCell] = []
    question = FitQuestion(
        "tiny", ("rtx4090",), (1,), (512,), 2048, device_mem="2GiB", host_mem="1GiB"
    )
    tables: list[FitTable] = []
    found = ts.fit(question, effort="normal", on_cell=seen.append, on_table=tables.append)
    assert [len(one.cells) for one in tables[: len(ways())]] == [1, 2, 3, 4, 5]
    assert tables[-1] == found and "..." not in shown(found)
    quick = {cell.way: cell for cell in seen if cell.effort == "quick"}
    assert len(seen) == 2 * len(ways()) and [c.effort for c in seen[: len(ways())]] == ["quick"] * 5
    for cell in found.cells:
        assert (cell.tokens_per_s or 0) >= (quick[cell.way].tokens_per_s or 0)


def test_rows_say_what_is_bfloat16_and_what_no_gpu_has_run() -> None:
    """The latter as docs/benchmarks/gpu.md lists it; every cell has an error."""
    given = ("qwen3-0.6b", "--machine", "rtx4090", "--seq-len", 512, "--tokens-per-step", 2048)
    screen = " ".join(call("fit", *given, "--jobs", 1).out.split())
    assert "full: weights, gradients and optimizer state in bfloat16." in screen
    assert "adapters, gradients and optimizer state in bfloat16, base in nf4." in screen
    assert "rounded stochastically; there is no float32 master" in screen
    assert "twinstream train Qwen3-0.6B DATA" in screen
    assert "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B" in screen
    told = screen.partition("Not yet run on a GPU, only on CPUs: ")[2].partition(".")[0]
    assert "full, 8-bit optimizer (8-bit state)" in told and "full (" not in told
    text = Path("docs/benchmarks/gpu.md").read_text().partition("## Not yet run on a GPU")[2]
    rows = text.lower()
    for name in ("LoRA", "a base in few bits", "DPO", "8-bit state", "mixtures of experts",
                 "models of other families"):  # fmt: skip
        assert name.lower() in rows
    assert screen.count("+/-") == 5
    assert "--effort normal refines" in screen
    assert "Not yet run" not in call("fit", "tiny", "--machine", "cpu", *STEP).out
    unknown = FitTable(
        model="m", tokens_per_step=1, dataset_tokens=None, peaks={"x": ""}, caps={"x": Caps()},
        cells=(FitCell(machine="x", way="full", seq_len=1, is_own=False, tokens_per_step=1,
                       tokens_per_s=9.0, mfu=0.5, command="", plan_command="", effort="quick"),),
    )  # fmt: skip
    assert "9.0 +/- ?" in shown(unknown) or "9 +/- ?" in shown(unknown)


def test_what_has_no_kernels_is_refused_by_name() -> None:
    told = call("fit", "gpt-1.7b", "--machine", "rtx4090", *STEP)
    assert told.code == 0 and "mlp = gelu" in " ".join(told.out.split())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((), "name at least one machine"),
        (("--machine", "nowhere"), "unknown machine 'nowhere'"),
        (("--machine", "cpu", "--seq-len", "2x"), "'2x' is no length"),
        (("--machine", "cpu", "--seq-len", "0"), "'0' is no length"),
        (("--machine", "cpu", "--price", "h100=1"), "no price of an hour of cpu"),
        (("--machine", "cpu", "--price", "nan"), "no price"),
        (("--machine", "cpu", "--device-mem", "0"), "--device-mem 0 is no memory"),
        (("--machine", "cpu", "--host-mem", "much"), "much"),
        (("--machine", "cpu", "--effort", "hard"), "--effort"),
        (("--machine", "cpu", "--lora", "r=0"), "r"),
    ],
)
def test_a_wrong_input_is_one_message(given: tuple[str, ...], says: str) -> None:
    told = call("fit", "tiny", *given)
    assert told.code == 2 and says in " ".join(told.err.split()), (told.code, told.err)
    assert call("fit", "nothing-like-it", "--machine", "cpu").code == 2


def test_lengths_and_prices_are_read() -> None:
    assert lengths_of("512,1k,1024") == (512, 1024)
    assert prices_by_machine(["2"], ("cpu", "h100")) == {"cpu": 2.0, "h100": 2.0}
    assert prices_by_machine(["cpu=1,H100=$2.50"], ("cpu", "h100_datasheet")) == {
        "cpu": 1.0, "h100_datasheet": 2.5,
    }  # fmt: skip
