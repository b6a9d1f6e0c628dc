"""Every test that the default run leaves out is there, and most of each file are not left out."""

from tests.contract.package_tree import REPO
from tests.slow_tests import slow_tests

OF_LINT = {"tests/contract/test_types.py::test_the_package_passes_mypy_strict"}  # `make lint`


def test_what_is_left_out_is_there():
    for name in slow_tests():
        path, _, rest = name.partition("::")
        text = (REPO / path).read_text(encoding="utf-8")
        assert f"def {rest.partition('[')[0]}(" in text, f"{name} is gone: take it from slow.txt"


def test_most_tests_of_a_file_are_always_run():
    by_file: dict[str, int] = {}
    for name in slow_tests() - OF_LINT:
        if "[" not in name:  # of one with several cases, most of the file still shows it
            path = name.partition("::")[0]
            by_file[path] = 1 + by_file.get(path, 0)
    texts = {path: (REPO / path).read_text(encoding="utf-8") for path in by_file}
    alone = [path for path, num in by_file.items() if texts[path].count("\ndef test_") <= num]
    assert not alone, f"what these files show would never be shown: {alone}"
