"""The whole package passes `mypy --strict`."""

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
    printed = run_python(
        *("-m", "mypy", "--strict", "--package", "twinstream"),
        f"--config-file={REPO / 'pyproject.toml'}",
        f"--cache-dir={REPO / '.mypy_cache/contract'}",
        cwd=tmp_path,
    )
    assert f"in {len(module_files())} source files" in printed
