"""The snippets of docs/python.md run, in their order, and name what is public."""

import re

import twinstream as ts
from tests.contract.package_tree import REPO

PAGE = (REPO / "docs" / "python.md").read_text(encoding="utf-8")


def test_every_name_is_public():
    named = set(re.findall(r"\bts\.(\w+)", PAGE))
    assert len(named) > 20
    assert named <= set(ts.__all__), named - set(ts.__all__)


def test_the_snippets_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    exec(compile("\n".join(snippets), "docs/python.md", "exec"), {})
    assert (tmp_path / "report.html").is_file()
    assert (tmp_path / "run" / "model").is_dir()
