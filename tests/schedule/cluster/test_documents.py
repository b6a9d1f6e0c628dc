"""The documents of a cluster go into files and come back the same, or are refused with a reason."""

import json

import pytest

from tests.helpers.cluster_sketches import cluster, cluster_timeline, talk
from tests.helpers.sketches import op
from twinstream.schedule.document import Schedule
from twinstream.schedule.files import DocumentError, read_document, write_document
from twinstream.schedule.timeline import Timeline

OPS = [op("a", "compute"), talk("sum", "tp", ("a",), ("sum",))]


@pytest.fixture
def schedule() -> Schedule:
    return cluster({"a": OPS, "b": OPS}, [("a", "sum")], [("b", "sum")])


@pytest.fixture
def line(schedule: Schedule) -> Timeline:
    spans = [[(0, 5), (5, 9)], [(9, 12), (12, 20)]]
    return cluster_timeline(schedule, {"a": spans, "b": spans}, step_ns=11.5)


def test_a_schedule_of_a_cluster_comes_back_from_its_file(schedule, tmp_path):
    path = tmp_path / "cluster.json"
    write_document(schedule, path)
    assert read_document(Schedule, path) == schedule


def test_a_timeline_of_a_cluster_comes_back_from_its_file(line, tmp_path):
    path = tmp_path / "timeline.json"
    write_document(line, path)
    back = read_document(Timeline, path)
    assert back == line
    assert (back.step_ns, back.cold_ns, back.classes["b"].passes[1].end_ns) == (11.5, 1, (12, 20))


def test_what_is_wrong_with_a_document_is_said(schedule, line, tmp_path):
    path = tmp_path / "document.json"
    said = json.loads(schedule.model_dump_json(exclude_none=True))
    said["classes"][1]["schedule"] = "nobody's"
    path.write_text(json.dumps(said))
    with pytest.raises(DocumentError, match=r"not a valid schedule document.*nobody's"):
        read_document(Schedule, path)
    said = json.loads(line.model_dump_json(exclude_none=True))
    del said["classes"]["a"]["passes"][0]
    path.write_text(json.dumps(said))
    with pytest.raises(DocumentError, match="different numbers of passes"):
        read_document(Timeline, path)
    path.write_text(json.dumps(said | {"schema_version": 2}))
    with pytest.raises(DocumentError, match="is a timeline of format 2"):
        read_document(Timeline, path)
