"""Files and functions stay small enough to read at once, and a class name means one class."""

import ast
from collections import defaultdict

from tests.contract.package_tree import REPO, module_files

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80

# Public class names that still mean several classes, and how many. The list may only shrink.
SHARED_CLASS_NAMES = {
    "Cell": 2,  # fidelity, study
    "Prepared": 2,  # clusters, training
    "Recomputed": 2,  # clusters/search, measures
    "RunOptions": 3,  # executor/program, commands
    "Step": 2,  # screens, study
}


def test_no_file_is_too_long():
    files = [*module_files().values(), *(REPO / "tests").rglob("*.py")]
    sizes = {
        str(path.relative_to(REPO)): len(path.read_text(encoding="utf-8").splitlines())
        for path in files
    }
    assert_small(sizes, MAX_FILE_LINES)


def test_no_function_is_too_long():
    sizes = {}
    for module, path in module_files().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                sizes[f"{module}:{node.lineno} {node.name}"] = node.end_lineno - node.lineno + 1
    assert_small(sizes, MAX_FUNCTION_LINES)


def test_class_names_are_unique():
    places = defaultdict(list)
    for module, path in module_files().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{module}:{node.lineno}")
    assert len(places) > 500
    new = {
        name: where
        for name, where in places.items()
        if len(where) > SHARED_CLASS_NAMES.get(name, 1)
    }
    assert not new, "\nname these classes apart:\n" + "\n".join(
        f"{name}: {', '.join(where)}" for name, where in sorted(new.items())
    )


def assert_small(sizes: dict[str, int], max_lines: int) -> None:
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)
    print(*(f"{sizes[name]:4} lines: {name}" for name in largest[:5]), sep="\n")
    too_long = [f"{sizes[name]} lines: {name}" for name in largest if sizes[name] > max_lines]
    assert not too_long, f"\nover {max_lines} lines:\n" + "\n".join(too_long)
