"""One document: a device is a mesh of one rank, and files of both forms are read and written."""

import json
import pickle
from pathlib import Path

import pytest

from twinstream.schedule.cluster.verify import verify
from twinstream.schedule.cluster.violations import ClassUnsafe
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import ArgumentError
from twinstream.schedule.files import DocumentError, read_document, write_document
from twinstream.schedule.proof.violations import WrongContent
from twinstream.schedule.timeline import Timeline, TimelineMismatch, require_timeline_of

FILES = Path(__file__).parent.parent / "data" / "documents"  # written when there were two kinds
KINDS = {"schedule": Schedule, "timeline": Timeline}


def read(name: str):
    return read_document(KINDS[name.split(".")[1]], FILES / f"{name}.json")


@pytest.mark.parametrize("what", KINDS)
@pytest.mark.parametrize("ranks", ["one_device", "ranks"])
def test_a_file_of_either_form_comes_back_byte_for_byte(ranks, what, tmp_path):
    found = read(f"{ranks}.{what}")
    assert found.is_one_device == (ranks == "one_device")
    write_document(found, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (FILES / f"{ranks}.{what}.json").read_bytes()
    assert pickle.loads(pickle.dumps(found)) == found


def test_one_device_reads_as_if_there_were_no_mesh():
    schedule, line = read("one_device.schedule"), read("one_device.timeline")
    assert (schedule.mesh.size, schedule.num_ops, schedule.order) == (1, 3, ())
    assert [op.op_id for op in schedule.ops] == ["a", "load", "b"] == list(line.op_ids)
    assert schedule.tokens_per_step == schedule.workload.tokens_per_step == 8
    assert line.span_ns("load") == (17, 21) and line.cold_ns == 12
    assert [row["op_id"] for row in schedule.records()] == [row["op_id"] for row in line.records()]
    assert [type(one) for one in verify(schedule)] == [WrongContent]
    require_timeline_of(schedule, line)


def test_ranks_have_a_schedule_for_each_class():
    schedule, line = read("ranks.schedule"), read("ranks.timeline")
    assert (schedule.mesh.size, schedule.num_ops, len(schedule.order)) == (4, 4, 2)
    assert [type(one) for one in verify(schedule)] == [ClassUnsafe, ClassUnsafe]
    require_timeline_of(schedule, line)
    for one in (schedule, line):
        with pytest.raises(ArgumentError, match="asked of one device's"):
            _ = one.only
    with pytest.raises(TimelineMismatch, match="of one device, and the schedule of the"):
        require_timeline_of(schedule, read("one_device.timeline"))


def test_a_copy_of_one_device_has_its_rank_s_fields_changed():
    schedule, line = read("one_device.schedule"), read("one_device.timeline")
    changed = schedule.model_copy(update={"policy": "mine", "model_flops": 7})
    assert (changed.policy, changed.only.model_flops, changed.model_flops) == ("mine", 7, 7)
    assert json.loads(changed.model_dump_json())["policy"] == "mine"
    slower = line.model_copy(update={"step_ns": 20.0})
    assert slower.step_ns == slower.only.step_ns == 20.0
    ranks = read("ranks.schedule").model_copy(update={"model_flops": 7})
    assert ranks.model_flops == 7


@pytest.mark.parametrize(
    ("name", "gone", "told"),
    [
        ("one_device.schedule", "ops", "schedule document: ops: Field required"),
        ("ranks.schedule", "mesh", "schedule document: mesh: Field required"),
        ("ranks.schedule", "classes", "schedule document: classes: Field required"),
        ("one_device.timeline", "passes", "timeline document: passes: Field required"),
        ("ranks.timeline", "provenance", "timeline document: provenance: Field required"),
    ],
)
def test_a_damaged_file_is_told_of_in_its_own_form(name, gone, told, tmp_path):
    document = json.loads((FILES / f"{name}.json").read_text())
    del document[gone]
    (tmp_path / "damaged.json").write_text(json.dumps(document))
    with pytest.raises(DocumentError, match=told):
        read_document(KINDS[name.split(".")[1]], tmp_path / "damaged.json")
