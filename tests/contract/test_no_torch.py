"""Planning and simulating need no torch."""

from tests.contract.package_tree import module_files, needs_torch
from tests.contract.run_python import run_python

IMPORT_EACH = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"importing {name} imports torch")
"""


def test_nothing_but_the_executor_imports_torch(tmp_path):
    modules = [module for module in module_files() if not needs_torch(module)]
    assert {"twinstream", "twinstream.schedule", "twinstream.simulator"} <= set(modules)
    run_python("-c", IMPORT_EACH, *modules, cwd=tmp_path)
