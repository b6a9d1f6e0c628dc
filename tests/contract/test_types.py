"""The whole package, and what measures it, pass `mypy --strict`."""

import re

from tests.contract.package_tree import FOLDERS, REPO, module_files
from tests.contract.run_python import run_python


def test_the_package_passes_mypy_strict(tmp_path):
    # mypy does not follow the import hook of an editable install: give it one real tree.
    tree = tmp_path / "twinstream"
    tree.mkdir()
    for entry in (REPO / "twinstream").iterdir():
        (tree / entry.name).symlink_to(entry)
    for folder in FOLDERS:
        (tree / folder).symlink_to(REPO / folder)
    (tmp_path / "benchmarks").symlink_to(REPO / "benchmarks")
    printed = run_python(
        *("-m", "mypy", "--strict", "--package", "twinstream", "--package", "benchmarks"),
        *("--exclude", "benchmarks/.*/tests/"),
        f"--config-file={REPO / 'pyproject.toml'}",
        f"--cache-dir={REPO / '.mypy_cache/contract'}",
        cwd=tmp_path,
    )
    checked = re.search(r"no issues found in (\d+) source files", printed)
    assert checked is not None, printed
    # mypy also counts the folders of data files, as namespace packages.
    assert int(checked[1]) >= len(module_files())
