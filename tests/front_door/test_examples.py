"""What the README names is there, and is what it says."""

import json
import re
import runpy
import sys

import pytest

from tests.contract.package_tree import REPO
from tests.front_door.command_line import call, error_of
from twinstream.hardware_profiles.measured_table import read_measured
from twinstream.schedule.document import Schedule
from twinstream.schedule.timeline import RankTimeline
from twinstream.study.sweep.config import load_config


def test_every_file_of_the_readmes_commands_is_shipped_or_made_by_one_before():
    readme = (REPO / "README.md").read_text().replace("\\\n", " ")
    lines = re.findall(r"^(?:    |\$ )twinstream .*", readme, re.MULTILINE)
    assert len(lines) >= 3
    made: set[str] = set()
    for line in lines:
        command = line.split("#")[0]
        outputs = set(re.findall(r"(?:-o|--html) (\S+)", command))
        files = set(re.findall(r"\S+\.(?:toml|csv|json|html|gz)\b", command))
        missing = {f for f in files - outputs - made if not (REPO / f).is_file()}
        assert not missing, command
        made |= outputs


def test_the_examples_are_read():
    cells = load_config(REPO / "examples" / "sweep.toml").cells()
    assert len(cells) == 4 * 3
    rows = read_measured(REPO / "examples" / "measured.csv")
    assert {"H100", "RTX3090"} <= {row.machine for row in rows}


def test_a_schedule_a_timeline_and_a_machine_are_shown_in_a_line(files):
    schedule = files.read_schedule()
    timeline = RankTimeline.model_validate_json(files.predicted.read_bytes())
    assert isinstance(schedule, Schedule)
    shown = (repr(schedule), repr(timeline))
    assert shown[0].startswith("<Schedule of tiny on cpu, policy streaming: ")
    assert shown[0].endswith(" ops, 256 tokens a step>")
    assert shown[1].startswith("<Timeline simulated on cpu: ")
    assert all(len(text) < 120 for text in shown)


def test_a_profile_of_wrong_fields_lists_the_known_ones_once(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "cpu"\n' + "".join(f"zzz{n}zzz = 1\n" for n in range(11)))
    message = error_of("plan", "--model", "tiny", "--machine", path, "--seq-len", 64)
    assert message.count("unknown field") == 11
    assert message.count("host_dram_bytes_per_s") == 1


def test_a_slow_step_has_a_throughput(tmp_path):
    slow = tmp_path / "slow.toml"
    slow.write_text('base = "cpu"\npeak_fp32_flop_per_s = 1e8\n')
    step = ("--model", "tiny", "--seq-len", 64, "--tokens-per-step", 256)
    told = call("plan", *step, "--machine", slow, "--policy", "streaming").out
    (line,) = (line for line in told.splitlines() if "throughput" in line)
    assert re.search(r"[1-9].* tokens/s", line), line


SMALL_MODEL = str(REPO / "examples" / "small_model.py")


def test_the_model_of_the_readme_takes_chats_and_ends_its_answers(tmp_path):
    """As the README has it, made of one package's docstrings."""
    made = runpy.run_path(SMALL_MODEL)["main"]
    made.__globals__["PACKAGES"] = (json,)
    made(tmp_path / "small")
    turns = [("user", "What is a tensor?"), ("assistant", "An array with a dtype.")]
    rows = [{"messages": [{"role": role, "content": text} for role, text in turns]}]
    chat = tmp_path / "chat.jsonl"
    chat.write_text("\n".join(map(json.dumps, rows * 20)))
    told = call("train", tmp_path / "small/model", chat, "--dry-run", "--seq-len", 128,
                "--tokens-per-step", 256, "--machine", "cpu")  # fmt: skip
    assert told.code == 0, told.err
    assert "no end token is learned" not in told.out + told.err


def test_a_missing_package_of_the_readmes_example_is_one_message(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit, match=r"transformers is not installed .* -m pip install"):
        runpy.run_path(SMALL_MODEL)
