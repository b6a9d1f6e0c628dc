"""Imports point one way, by full name, and torch stays in the executor."""

import pytest

from tests.contract.import_rules import violations
from tests.contract.package_tree import REPO, module_files

FORBIDDEN = [
    ("twinstream.schedule.ops", "from twinstream.models.decoders.spec import ModelSpec"),
    ("twinstream.schedule.ops", "from twinstream import api"),
    ("twinstream.models.decoders.spec", "import twinstream.hardware_profiles.schema"),
    ("twinstream.models.decoders.spec", "from twinstream import hardware_profiles"),
    ("twinstream.hardware_profiles.cost", "from twinstream.models import work"),
    ("twinstream.planner.plan", "from twinstream.simulator.replay import simulate"),
    ("twinstream.planner.plan", "from twinstream.cli import main"),
    ("twinstream.planner.plan", "if TYPE_CHECKING:\n    import twinstream.executor"),
    ("twinstream.planner.plan", "def f():\n    from twinstream import simulator"),
    ("twinstream.simulator.replay", "import twinstream.planner as p"),
    ("twinstream.simulator.replay", "from twinstream.executor import execute"),
    ("twinstream.executor.run.execute", "from twinstream.simulator import replay"),
    ("twinstream.executor", "from twinstream.planner import plan"),
    ("twinstream.models", "from . import spec"),
    ("twinstream.models.decoders.spec", "from .layout import Layout"),
    ("twinstream.cli", "from .api import plan"),
    ("twinstream.cli", "import planner"),
    ("twinstream.cli", "import os, models.spec"),
    ("twinstream.cli", "from executor.execute import execute"),
    ("twinstream.cli", "import torch"),
    ("twinstream.cli", "if TYPE_CHECKING:\n    from torch import Tensor"),
    ("twinstream.cli", "class Command:\n    import torch"),
    ("twinstream.planner.plan", "def f():\n    import torch"),
    ("twinstream.simulator.replay", "from torch.cuda import Event"),
    ("twinstream.planner.plan", "importlib.import_module('twinstream.simulator.replay')"),
    ("twinstream.planner.plan", "import_module('.simulator', 'twinstream')"),
    ("twinstream.planner.plan", "__import__('torch')"),
    ("twinstream.planner.plan", "import_module(name)"),
]
ALLOWED = [
    ("twinstream.schedule.ops", "from twinstream.schedule.node import Node"),
    ("twinstream.models.decoders.spec", "from twinstream.schedule.errors import TwinstreamError"),
    ("twinstream.models.decoders.spec", "from twinstream.models import layout"),
    (
        "twinstream.planner.plan",
        "import twinstream.models.decoders.spec, twinstream.hardware_profiles",
    ),
    ("twinstream.simulator.replay", "from twinstream.hardware_profiles.cost import cost_alone_ns"),
    ("twinstream.executor.run.execute", "import torch.cuda"),
    ("twinstream.cli", "async def f():\n    from torch import cuda"),
    ("twinstream.cli", "from twinstream import api, planner, simulator\nimport torchless"),
    ("twinstream.report.table", "from twinstream.simulator.replay import simulate"),
    ("twinstream.planner.plan", "import_module('json')"),
]


def test_every_import_of_the_package_points_the_right_way():
    problems = [
        f"{path.relative_to(REPO)}, {problem}"
        for module, path in module_files().items()
        for problem in violations(module, path.read_text(encoding="utf-8"))
    ]
    assert not problems, "\n" + "\n".join(problems)


@pytest.mark.parametrize(("module", "source"), FORBIDDEN)
def test_a_forbidden_import_is_found(module, source):
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(("module", "source"), ALLOWED)
def test_an_allowed_import_is_not_reported(module, source):
    assert violations(module, source) == []
