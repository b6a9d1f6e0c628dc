"""Loads of experts: how they change the time of grouped matmuls, and what is refused."""

import json

import pytest

from tests.helpers.plans import planned
from tests.helpers.tiny_chains import small
from twinstream.hardware_profiles.cost import work_time
from twinstream.hardware_profiles.loader import load_machine
from twinstream.measures.expert_load import LoadError, read_load, with_load
from twinstream.models.lowering.lower import lower
from twinstream.models.recipes.recipe import KernelChoice, Recipe
from twinstream.schedule.document import Caps
from twinstream.schedule.workload import Workload

H100 = load_machine("h100")
TRITON = Recipe(kernels=KernelChoice(vector="triton", attention="sdpa_flash"))


@pytest.fixture(scope="module")
def schedule():
    """8 experts, 2 a token, 512 tokens: 128 rows of an expert on average, a tile."""
    workload = Workload(seq_len=512, chunk_tokens=512, chunks_per_round=1, rounds_per_step=1)
    spec = small("tiny-experts", dtype="bfloat16", d_model=64)
    return planned(lower(spec, workload, TRITON), H100, Caps(), "resident")


def grouped_ns(schedule) -> float:
    works = [w for c in schedule.calls.values() for w in c.cost if w.unit == "grouped_matmul"]
    assert works
    return sum(work_time(work, H100).compute_ns for work in works)


def rows(schedule) -> set[int]:
    """Rows of an expert by which tiles are padded: half a tile over them."""
    works = (w for c in schedule.calls.values() for w in c.cost if w.unit == "grouped_matmul")
    return {work.shape[0] for work in works}


def test_padding_follows_the_loads(schedule):
    """1,024 rows: tiles exactly full, half of them empty, and one expert with all of them."""
    full, half, one = (
        with_load(schedule, load) for load in ((1.0,) * 8, (129.0, 127.0) * 4, (1.0,) + (0.0,) * 7)
    )
    assert rows(schedule) == rows(half) == {128}  # 12 tiles of 8: drawn loads waste half a tile
    assert rows(full) == rows(one) == {1024}  # nothing is wasted
    assert grouped_ns(full) < grouped_ns(half) == grouped_ns(schedule)


def test_what_is_no_load_is_refused(schedule, tmp_path):
    file = tmp_path / "load.json"
    for text in ("{}", "[]", "[0, 0]", '["a"]', "[1, -1]", "[NaN]", "x"):
        file.write_text(text)
        with pytest.raises(LoadError, match="--load"):
            read_load(file)
    with pytest.raises(LoadError, match="cannot be read"):
        read_load(tmp_path / "none.json")
    file.write_text(json.dumps([1, 2, 3]))
    with pytest.raises(LoadError, match="3 experts, and the schedule's model has 8 experts"):
        with_load(schedule, read_load(file))
