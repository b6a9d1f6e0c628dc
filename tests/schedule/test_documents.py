"""Documents: nothing is lost in JSON, and what is wrong is refused with its place."""

import json
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import twinstream.schedule
from tests.helpers.schedules import schedules
from tests.schedule.small import CHAIN, SCHEDULE
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import DocumentError, read_document, write_document
from twinstream.schedule.node import Node
from twinstream.schedule.ops import Attribute, KernelCall
from twinstream.schedule.tensors import DEVICE, Tier
from twinstream.schedule.timeline import PassSpans, Provenance, RankTimeline
from twinstream.schedule.workload import Packing, Workload

OPERAND = ("ops", 2, "operands", 0)
ATTRIBUTES = (
    st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)


@settings(max_examples=50)
@given(pair=schedules())
def test_json_loses_nothing(pair: tuple[Chain, RankSchedule]) -> None:
    chain, schedule = pair
    for document in (chain, schedule):
        kind: type[Node] = type(document)
        for text in (document.model_dump_json(), document.model_dump_json(exclude_none=True)):
            again = kind.model_validate_json(text)
            assert again == document
            assert repr(again) == repr(document)  # 1, 1.0 and True are equal, but not the same


@given(attributes=st.dictionaries(st.text(), ATTRIBUTES))
def test_attributes_keep_type_and_value_in_json(attributes: dict[str, Attribute]) -> None:
    call = KernelCall(kernel="k", attributes=attributes, cost=())
    again = KernelCall.model_validate_json(call.model_dump_json())
    assert repr(again) == repr(call)


@pytest.mark.parametrize("document", [SCHEDULE, CHAIN])
def test_a_file_loses_nothing_and_leaves_nothing_else(document: Node, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_document(document, path)
    write_document(document, path)
    assert read_document(type(document), path) == document
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert path.read_text().endswith("}\n")


def test_documents_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        SCHEDULE.policy = "another"  # type: ignore[misc]


def edited(*place: str | int, to: object) -> dict[str, Any]:
    """SCHEDULE as plain data with one value replaced."""
    data: dict[str, Any] = json.loads(SCHEDULE.model_dump_json())
    at: Any = data
    for step in place[:-1]:
        at = at[step]
    at[place[-1]] = to
    return data


def refused(data: object) -> str:
    with pytest.raises(ValidationError) as caught:
        RankSchedule.model_validate_json(json.dumps(data))
    [error] = caught.value.errors()
    return f"{'.'.join(map(str, error['loc']))}: {error['msg']} [{error['type']}]"


@pytest.mark.parametrize(
    ("place", "to", "told"),
    [
        (("tensors", 1, "tensor_id"), "weight", "tensor 'weight' is declared twice"),
        (("slots", 1, "slot_id"), "device.weight", "slot 'device.weight' is declared twice"),
        (("ops", 1, "op_id"), "feed", "op 'feed' is declared twice"),
        (("tensors", 2, "parent"), "nobody", "tensor 'hidden.0' names parent 'nobody', which"),
        (("ops", 2, "call"), "nothing", "op 'op-step' names call 'nothing', which"),
        (
            ("ops", 2, "operands", 0, "tensor"),
            "nobody",
            "op 'op-step' names tensor 'nobody', which",
        ),
        ((*OPERAND, "slot"), "nowhere", "op 'op-step' names slot 'nowhere', which"),
        (("ops", 1, "source"), "nowhere", "op 'load' names slot 'nowhere', which"),
        (("ops", 1, "destination"), "nowhere", "op 'load' names slot 'nowhere', which"),
        (("ops", 0, "slot"), "nowhere", "op 'feed' names slot 'nowhere', which"),
        (("ops", 6, "tensor"), "nobody", "op 'fetch' names tensor 'nobody', which"),
        (("carried", 0, "slot"), "nowhere", "op 'carried' names slot 'nowhere', which"),
    ],
)
def test_ids_are_unique_and_known(place: tuple[str | int, ...], to: str, told: str) -> None:
    message = refused(edited(*place, to=to))
    rest = " the schedule does not declare [unknown_id]" if told.endswith("which") else ""
    assert message == f": {told}{rest or ' [duplicate_id]'}"


@pytest.mark.parametrize(
    ("data", "place", "kind"),
    [
        (edited("schema_version", to=2), "schema_version", "literal_error"),
        (edited("color", to="red"), "color", "extra_forbidden"),
        (edited("ops", 0, "kind", to="dance"), "ops.0", "union_tag_invalid"),
        (edited("ops", 0, "index", to="0"), "ops.0.feed.index", "int_type"),
        (edited("ops", 0, "index", to=-1), "ops.0.feed.index", "greater_than_equal"),
        (edited("slots", 0, "size_bytes", to=0), "slots.0.size_bytes", "greater_than"),
        (edited("slots", 0, "size_bytes", to=1.0), "slots.0.size_bytes", "int_type"),
        (edited("slots", 0, "tier", "kind", to="tape"), "slots.0.tier.kind", "literal_error"),
        (edited("ops", 2, "operands", 0, "mode", to="eat"), "ops.2.compute.operands.0.mode",
         "literal_error"),
        (edited("ops", 5, "operands", 0, "num_parts", to=0),
         "ops.5.compute.operands.0.num_parts", "greater_than"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_at_its_place(data: dict[str, Any], place: str, kind: str) -> None:
    message = refused(data)
    assert message.startswith(f"{place}: ")
    assert message.endswith(f"[{kind}]")


@pytest.mark.parametrize(
    ("seq_len", "chunk_tokens", "chunks_per_round", "sequences_per_step"),
    [(512, 4096, 3, 24), (4096, 512, 16, 2), (512, 512, 1, 1)],
)
def test_chunks_pack_or_slice_sequences(
    seq_len: int, chunk_tokens: int, chunks_per_round: int, sequences_per_step: int
) -> None:
    workload = Workload(
        seq_len=seq_len,
        chunk_tokens=chunk_tokens,
        chunks_per_round=chunks_per_round,
        rounds_per_step=1,
    )
    assert workload.sequences_per_step == sequences_per_step
    assert workload.tokens_per_step == sequences_per_step * seq_len
    assert workload.sliced == (chunk_tokens < seq_len)


@pytest.mark.parametrize(
    ("seq_len", "chunk_tokens", "chunks_per_round", "message"),
    [
        (
            512, 768, 1,
            "a chunk of 768 tokens neither packs nor slices sequences of 512 tokens: one must be "
            "a multiple of the other",
        ),
        (
            768, 512, 1,
            "a chunk of 512 tokens neither packs nor slices sequences of 768 tokens: one must be "
            "a multiple of the other",
        ),
        (4096, 1024, 6, "a round of 6 chunks splits a sequence, which is 4 chunks"),
    ],
)  # fmt: skip
def test_a_workload_that_does_not_fit_is_refused(
    seq_len: int, chunk_tokens: int, chunks_per_round: int, message: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        Workload(
            seq_len=seq_len,
            chunk_tokens=chunk_tokens,
            chunks_per_round=chunks_per_round,
            rounds_per_step=1,
        )
    assert message in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    with pytest.raises(DocumentError) as caught:
        read_document(RankSchedule, path)
    assert str(caught.value) == f"cannot read {path}: No such file or directory"
    assert isinstance(caught.value, TwinstreamError)


def test_a_file_that_is_not_json_is_named_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text('{\n  "tensors": [,\n')
    with pytest.raises(DocumentError) as caught:
        read_document(RankSchedule, path)
    message = str(caught.value)
    assert message.startswith(f"{path} is not a valid schedule document: document: Invalid JSON")
    assert "line 2 column 15" in message


def test_errors_in_a_file_are_named_with_their_places(tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    data = edited("ops", 2, "operands", 1, "version", to=-1)
    data["slots"][0]["size_bytes"] = "big"
    data["policy"] = 3
    data["machine"] = None
    data["extra"] = 1
    path.write_text(json.dumps(data))
    with pytest.raises(DocumentError) as caught:
        read_document(RankSchedule, path)
    message = str(caught.value)
    assert message.startswith(
        f"{path} is not a valid schedule document: slots.0.size_bytes: Input should be a valid "
        "integer; ops.2.compute.operands.1.version: Input should be greater than or equal to 0; "
    )
    assert message.endswith("(and 2 more)")


def test_a_file_of_a_newer_format_says_so_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "newer.json"
    path.write_text(json.dumps(edited("schema_version", to=2) | {"streams": []}))
    with pytest.raises(DocumentError) as caught:
        read_document(RankSchedule, path)
    assert str(caught.value) == (
        f"{path} is a schedule of format 2, and this twinstream reads format 1: update twinstream"
    )


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_finite_number_is_refused(tmp_path: Path, number: str) -> None:
    bound = {
        "step_s": float(number), "device_s_per_gib": 0.0, "host_s_per_gib": 0.0,
        "link_s_per_gb_per_s": {}, "limits": [],
    }  # fmt: skip
    path = tmp_path / "nan.json"
    path.write_text(json.dumps(edited("bound", to=bound)))
    with pytest.raises(DocumentError, match=r"bound\.step_s: Input should be a finite number"):
        read_document(RankSchedule, path)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("step_ns", float("nan"), "Input should be a finite number"),
        ("spread_ns", float("nan"), "Input should be a finite number"),
        ("step_ns", 0.0, "Input should be greater than 0"),
        ("spread_ns", -1.0, "Input should be greater than or equal to 0"),
        ("period_passes", 0, "Input should be greater than 0"),
        ("passes", [], "at least 1 item"),
    ],
)
def test_times_that_no_run_has_are_refused(field: str, value: object, told: str) -> None:
    none = PassSpans(start_ns=(), end_ns=())
    where = Provenance(kind="simulated", where="here")
    data = RankTimeline(op_ids=(), passes=(none,), cold=none, step_ns=1.0, provenance=where)
    text = json.dumps(json.loads(data.model_dump_json()) | {field: value})
    with pytest.raises(ValidationError, match=told):
        RankTimeline.model_validate_json(text)


def test_tiers_have_names_and_alignments() -> None:
    assert (str(DEVICE), DEVICE.alignment_bytes) == ("device:0", 256)
    assert Tier(kind="disk", index=1).alignment_bytes == 4096


def test_sequences_of_any_lengths_fill_a_chunk() -> None:
    workload = Workload(
        seq_len=7, chunk_tokens=13, chunks_per_round=2, rounds_per_step=3,
        packing=Packing(most_sequences=4, expected_lengths=(5, 1, 7)),
    )  # fmt: skip
    assert (workload.sequences_per_step, workload.tokens_per_step) == (18, 78)
    assert not workload.sliced and workload.chunks_per_sequence == 1
    assert Workload.model_validate_json(workload.model_dump_json()) == workload


@pytest.mark.parametrize("lengths", [(5, 1, 6), (5, 8), (13,), (7, 0, 6), (), (5, 5, 1, 1, 1)])
def test_lengths_that_do_not_fill_a_chunk_are_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValidationError, match=r"add up|greater than 0|at least 1|more than"):
        Workload(
            seq_len=7, chunk_tokens=13, chunks_per_round=1, rounds_per_step=1,
            packing=Packing(most_sequences=4, expected_lengths=lengths),
        )  # fmt: skip


def test_passes_in_another_order_than_they_ran_are_refused() -> None:
    first, second = (PassSpans(start_ns=(0,), end_ns=(end,)) for end in (5, 9))
    where = Provenance(kind="simulated", where="here")
    with pytest.raises(ValidationError, match="ends before the one that it follows"):
        RankTimeline(
            op_ids=("a",), passes=(second, first), cold=first, step_ns=4.0, provenance=where
        )


def test_a_workload_that_is_forward_only_says_so_and_has_one_round() -> None:
    training = Workload(seq_len=8, chunk_tokens=8, chunks_per_round=3, rounds_per_step=4)
    assert "forward_only" not in training.model_dump()
    forward = training.forward
    assert (forward.tokens_per_step, forward.rounds_per_step) == (24, 1)
    assert Workload.model_validate_json(forward.model_dump_json()) == forward
    with pytest.raises(ValidationError, match="has one round, not 4"):
        Workload.model_validate(training.model_dump() | {"forward_only": True})


def _kinds_below(kind: type[Node]) -> Iterator[type[Node]]:
    for below in kind.__subclasses__():
        yield below
        yield from _kinds_below(below)


def test_what_may_be_none_may_be_left_out() -> None:
    """Files leave out what is None, so a field that is none and required cannot be read again."""
    for module in pkgutil.iter_modules(twinstream.schedule.__path__, "twinstream.schedule."):
        import_module(module.name)
    written = {
        k for k in _kinds_below(Node) if k.__module__.rpartition(".")[0] == "twinstream.schedule"
    }
    for kind in written:
        for name, field in kind.model_fields.items():
            if field.is_required() and type(None) in get_args(field.annotation):
                pytest.fail(f"{kind.__name__}.{name} is None in no file")
