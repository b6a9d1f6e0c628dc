"""Every command that reads files, with one file damaged at a time: an answer or one message.

Whatever json, tomllib, safetensors, tokenizers, jinja2 or transformers raise over a bad file is
caught here. Nothing is waited for without end: an input has two minutes.
"""

import json
import os
import random
import re
import shutil
import signal
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import pytest
import transformers

from tests.data.samples import tokenizer_folder
from tests.executor.weights.small_models import SIZES
from tests.front_door.command_line import call
from tests.front_door.conftest import Files
from tests.front_door.damaged_documents import as_toml, damaged
from tests.traced.families import tiny_config
from tests.training.small_runs import SHAPE, write_rows
from twinstream.hardware_profiles.clusters.loader import load_cluster
from twinstream.hardware_profiles.loader import load_machine

SEED = int(os.environ.get("TWINSTREAM_SEED", "0"))
STEP = ("--seq-len", "64", "--tokens-per-step", "256")
FEW, MANY = 10, 300  # inputs; the many are in tests/slow.txt
SWEEP = """
[fixed]
model = "tiny"
machine = "cpu"
seq_len = 64
tokens_per_step = "256"
policy = "streaming"

[axes]
device_mem = ["8MiB", "16MiB"]
"""
_OF_VALUES = (".json", ".jsonl", ".toml", ".csv", ".safetensors")
_MOST_S = 120
_BYTES = (
    b"\x00",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"[" * 9000,
    b"9" * 5000,
    b'"',
    b"NaN",
    b"-",
    b"\n",
)


@dataclass(frozen=True)
class Fuzzed:
    """A command, and patterns of the files of which one is damaged."""

    arguments: tuple[str, ...]
    files: tuple[str, ...]
    lasts: bool = False  # seconds an input


MODEL_FILES = ("model/config.json", "model/tokenizer.json", "model/tokenizer_config.json",
               "model/model.safetensors", "rows.jsonl")  # fmt: skip
SHARDED = ("sharded/config.json", "sharded/model.safetensors.index.json",
           "sharded/model-00001-of-*.safetensors")  # fmt: skip
COMMANDS: dict[str, Fuzzed] = {
    "plan a config": Fuzzed(
        ("plan", "--model", "model/config.json", "--machine", "cpu", *STEP), ("model/config.json",)
    ),
    "plan a profile": Fuzzed(
        ("plan", "--model", "tiny", "--machine", "machine.toml", *STEP), ("machine.toml",)
    ),
    "plan a cluster": Fuzzed(
        ("plan", "--model", "tiny", "--cluster", "cluster.toml", "--gpus", "2", *STEP),
        ("cluster.toml",), lasts=True,
    ),
    "trace": Fuzzed(
        ("trace", "traced/config.json", "--seq-len", "16", "-o", "m.json"),
        ("traced/config.json",), lasts=True,
    ),
    "verify": Fuzzed(("verify", "schedule.json"), ("schedule.json",)),
    "simulate": Fuzzed(
        ("simulate", "schedule.json", "--machine", "machine.toml"),
        ("schedule.json", "machine.toml"),
    ),
    "compare": Fuzzed(
        ("compare", "schedule.json", "predicted.json", "measured.json"),
        ("schedule.json", "predicted.json", "measured.json"),
    ),
    "report": Fuzzed(
        ("report", "schedule.json", "--predicted", "predicted.json", "-o", "page.html"),
        ("schedule.json", "predicted.json"), lasts=True,
    ),
    "run": Fuzzed(("run", "schedule.json", "--steps", "1", "--backend", "cpu"), ("schedule.json",)),
    "train": Fuzzed(
        ("train", "model", "rows.jsonl", "-o", "new", "--steps", "1", *SHAPE), MODEL_FILES,
        lasts=True,
    ),
    "train a sharded model": Fuzzed(
        ("train", "sharded", "rows.jsonl", "-o", "new", "--steps", "1", "--dry-run",
         "--tokenizer", "bytes", *SHAPE), SHARDED,
    ),
    "fit": Fuzzed(
        ("fit", "model/config.json", "rows.jsonl", "--machine", "cpu", "--seq-len", "64",
         "--tokens-per-step", "256", "--jobs", "1"), MODEL_FILES[:3] + MODEL_FILES[4:], lasts=True,
    ),
    "sweep": Fuzzed(("sweep", "sweep.toml", "-o", "swept", "--jobs", "1"), ("sweep.toml",),
                    lasts=True),
    "validate": Fuzzed(("validate", "--measured", "measured.csv", "--machine", "h100"),
                       ("measured.csv",)),
    "calibrate": Fuzzed(("calibrate", "--base", "h100", "--measured", "measured.csv"),
                        ("measured.csv",), lasts=True),
    "resume": Fuzzed(
        ("train", "-o", "run", "--resume"),
        tuple(f"run/{name}" for name in ("run.toml", "machine.toml", "data.json", "plan.json",
              "metrics.jsonl", "tokens/*/*.tokens")) +
        tuple(f"run/checkpoint-1/{name}" for name in ("training.json", "COMPLETE",
              "adapter_model.safetensors", "adapter_config.json", "optimizer/opt.lora.0.bin")),
        lasts=True,
    ),
    "export": Fuzzed(("export", "run/model", "-o", "out", "--merge"),
                     ("run/model/adapter_config.json",
                      "run/model/adapter_model.safetensors"), lasts=True),
}  # fmt: skip


@pytest.fixture(scope="module")
def kit(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whole inputs of all commands."""
    folder = tmp_path_factory.mktemp("kit")
    for name in ("schedule", "predicted", "measured"):
        shutil.copy(getattr(files, name), folder / f"{name}.json")
    config = transformers.LlamaConfig(**(SIZES | {"vocab_size": 512}))
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder / "model")
    model.save_pretrained(folder / "sharded", max_shard_size="60KB")
    tokenizer_folder(folder / "model")
    (folder / "traced").mkdir()
    (folder / "traced/config.json").write_text(json.dumps(tiny_config("gpt2")))
    write_rows(folder / "rows.jsonl", 60)
    machine = load_machine("cpu").model_dump(mode="json")
    (folder / "machine.toml").write_text(as_toml(machine))
    cluster = load_cluster("rtx4090_pc").model_dump(mode="json")
    (folder / "cluster.toml").write_text(as_toml(cluster))
    (folder / "sweep.toml").write_text(SWEEP)
    lines = Path("examples/measured.csv").read_text().splitlines()
    (folder / "measured.csv").write_text("\n".join(lines[:4]) + "\n")
    made = call(
        "train", folder / "model", folder / "rows.jsonl", "-o", folder / "run", "--steps", "2",
        "--save-every", "1", "--lora", "r=2", *SHAPE,
    )  # fmt: skip
    assert made.code == 0, made.err
    shutil.rmtree(folder / "run/checkpoint-2")  # as if it had ended before
    return folder


@pytest.mark.parametrize(
    ("name", "number"),
    [(name, number) for number in (FEW, MANY) for name, one in COMMANDS.items()
     if number == MANY or not one.lasts],
)  # fmt: skip
def test_a_damaged_file_is_one_message_or_harmless(
    name: str, number: int, kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    draw, codes = random.Random(SEED), [0, 0, 0]
    shutil.copytree(kit, "whole")
    monkeypatch.chdir("whole")
    whole = call(*COMMANDS[name].arguments)
    assert whole.code == 0, f"{name}, of whole files: {whole.err}"
    monkeypatch.chdir(tmp_path)
    for at in range(number):
        shutil.copytree(kit, "kit")
        monkeypatch.chdir("kit")
        (path,) = Path().glob(draw.choice(COMMANDS[name].files))
        done = _damage(path, draw)
        with _within(f"{name} {at}: {done}"):
            outcome = call(*COMMANDS[name].arguments)
        told = f"{name} {at}: {done}: exit code {outcome.code}\n{outcome.err}"
        assert outcome.code in (0, 1, 2) and "Traceback" not in outcome.err + outcome.out, told
        if outcome.code == 2:
            assert "error: " in outcome.err, told
        codes[outcome.code] += 1
        monkeypatch.chdir(tmp_path)
        shutil.rmtree("kit")
    print(f"{name}: {number} inputs, exit codes 0, 1, 2: {codes}")
    assert codes[2], f"{name}: no damage was found"


def _damage(path: Path, draw: random.Random) -> str:
    """What was done to the file: to one of its values, its bytes, or itself."""
    content = path.read_bytes()
    match draw.randrange(8 if path.suffix in _OF_VALUES else 4):
        case 0:
            path.unlink()
            how = draw.choice((Path.mkdir, os.mkfifo, lambda p: p.symlink_to(p), lambda p: None))
            how(path)
            return f"{path} is no file"
        case 1:
            cut = draw.randrange(len(content))
            path.write_bytes(content[:cut])
            return f"{path} ends at byte {cut}"
        case 2 | 3:
            at, put = draw.randrange(len(content)), draw.choice(_BYTES)
            path.write_bytes(content[:at] + put + content[at + draw.randrange(9) :])
            return f"{path} has {put[:4]!r} of {len(put)} at byte {at}"
        case _:
            return _damage_value(path, content, draw)


def _damage_value(path: Path, content: bytes, draw: random.Random) -> str:
    seed = draw.randrange(2**32)
    match path.suffix:
        case ".json":
            ((done, document),) = damaged(json.loads(content), 1, seed)
            path.write_text(json.dumps(document))
        case ".toml":
            ((done, document),) = damaged(tomllib.loads(content.decode()), 1, seed)
            with suppress(ValueError):
                path.write_text(as_toml(document))
        case ".safetensors":
            length = int.from_bytes(content[:8], "little")
            ((done, document),) = damaged(json.loads(content[8 : 8 + length]), 1, seed)
            header = json.dumps(document).encode()
            path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
        case ".jsonl":
            lines = content.splitlines()
            at = draw.randrange(len(lines))
            ((done, document),) = damaged([json.loads(lines[at])], 1, seed)
            lines[at] = json.dumps(document[0] if document else None).encode()
            path.write_bytes(b"\n".join(lines) + b"\n")
        case _:
            words = re.split(rb"([,\n])", content)
            at = 2 * draw.randrange(len(words) // 2)
            words[at] = draw.choice((b"", b"-1", b"0", b"nan", b"1e400", b"x" * 3000, words[0]))
            path.write_bytes(b"".join(words))
            done = f"{words[at][:9]!r} is word {at // 2}"
    return f"{path}: {done}"


@contextmanager
def _within(what: str) -> Iterator[None]:
    """A command that hangs, or raises what no command may, fails with what was damaged."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no end after {_MOST_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_MOST_S)
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{what}: {error!r}") from error
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
