"""Files are written whole by `schedule/files.py`; what is appended to is listed here, with why."""

import ast

import pytest

from tests.contract.package_tree import REPO, module_files

ALLOWED = {
    "twinstream.schedule.files": "writes files whole",
    "twinstream.study.sweep.rows": "appends rows, cuts off what a kill left of one, holds the lock",
    "twinstream.executor.weights.weight_file": "writes more than fits in memory, tensor by tensor",
    "twinstream.executor.weights.checkpoint_files": "writes tensors where there is no other copy",
    "twinstream.executor.weights.state_file": "writes over a run's own file, which has no name",
    "twinstream.training.checkpoints": "copies files that are on the disk, where links fail",
    "twinstream.log.metrics": "appends events, cuts off what a kill left of one",
}
_METHODS = {
    *("write_text", "write_bytes", "touch", "mkstemp", "mkdtemp", "NamedTemporaryFile"),
    *("savefig", "write_image", "write_html", "to_csv", "dump", "save", "tofile"),
    *("copyfile", "copy2", "copytree"),
}
_WRITING_FLAGS = {"O_WRONLY", "O_RDWR", "O_APPEND", "O_CREAT"}


def writes(source: str) -> list[int]:
    """Lines in which a module opens a file for writing, or has a library write one."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [call.lineno for call in calls if _writes(call)]


def _writes(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", None) or getattr(call.func, "id", None)
    if name == "open_for_append":  # of schedule/files.py: who calls it is listed, too
        return True
    if name == "open":
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        texts = [arg.value for arg in given if isinstance(arg, ast.Constant)]
        modes = [text for text in texts if isinstance(text, str) and len(text) <= 3]
        flags = {node.attr for arg in given for node in ast.walk(arg) if hasattr(node, "attr")}
        return any(set("wax+") & set(mode) for mode in modes) or bool(flags & _WRITING_FLAGS)
    return isinstance(call.func, ast.Attribute) and name in _METHODS


def test_no_other_module_opens_files_for_writing():
    found = {
        module: writes(path.read_text(encoding="utf-8")) for module, path in module_files().items()
    }
    writing = {module: lines for module, lines in found.items() if lines}
    others = [
        f"{module_files()[module].relative_to(REPO)}, lines {lines}: use twinstream.schedule.files"
        for module, lines in writing.items()
        if module not in ALLOWED
    ]
    assert not others, "\n" + "\n".join(others)
    assert writing.keys() == ALLOWED.keys(), "a module is listed that writes nothing"


@pytest.mark.parametrize(
    "source",
    [
        "open(path, 'w')",
        "path.open('r+b')",
        "open(path, mode='xb')",
        "os.open(path, os.O_WRONLY | os.O_APPEND)",
        "path.write_text(text)",
        "figure.savefig(path)",
        "shutil.copyfile(path, other)",
        "torch.save(state, path)",
    ],
)
def test_writing_is_found(source):
    assert writes(source) == [1]


@pytest.mark.parametrize(
    "source",
    ["open(path)", "path.open('rb')", "write_text(text, path)", "os.open(path, os.O_RDONLY)"],
)
def test_reading_and_our_own_writing_are_not_reported(source):
    assert writes(source) == []
