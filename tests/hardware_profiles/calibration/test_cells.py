"""Which cells calibrate follows from configurations and predictions, never from results."""

from dataclasses import dataclass

import numpy as np
import pytest

from twinstream.hardware_profiles.calibration.cells import candidate_cells, informative_cells
from twinstream.hardware_profiles.errors import CalibrationError


@dataclass(frozen=True)
class Row:
    model: str
    seq_len: int
    host_mem_gib: float
    dev_mem_gib: float
    status: str = "ok"

    @property
    def planned_model(self) -> str:
        return self.model


def grid(model, lengths, caps=((32, 16), (64, 16), (32, 48), (64, 48))):
    return [Row(model, length, host, device) for length in lengths for host, device in caps]


LENGTHS = [512 * 2**i for i in range(12)]


def chosen(rows, effects=None, most=14):
    candidates = candidate_cells(rows)
    shown = np.zeros((len(candidates), 1)) if effects is None else effects(candidates)
    return informative_cells(candidates, shown, most)


def test_candidates_are_the_smallest_and_largest_caps_and_the_busiest_link():
    caps = {(c.host_mem_gib, c.dev_mem_gib) for c in candidate_cells(grid("8B", LENGTHS))}
    assert caps == {(32, 16), (64, 48), (64, 16)}
    assert len(candidate_cells(grid("8B", LENGTHS))) == 3 * len(LENGTHS)


def test_the_smallest_host_cap_is_a_candidate_on_whatever_device_cap_it_ran():
    """There the most is computed again; a table may have it on no small device cap."""
    caps = {(c.host_mem_gib, c.dev_mem_gib) for c in candidate_cells(
        grid("8B", LENGTHS, ((64, 16), (96, 16), (32, 24), (96, 48)))
    )}  # fmt: skip
    assert caps == {(64, 16), (96, 16), (32, 24), (96, 48)}


def test_rows_that_recompute_are_wanted_to_tell_forward_from_backward_attention():
    """Effects of forward and backward attention: only where the host is small are they not in
    proportion, since attention is computed again."""

    def attention(candidates):
        share = np.array([c.seq_len / LENGTHS[-1] for c in candidates])
        again = np.array([1.6 if c.host_mem_gib == 32 else 1.0 for c in candidates])
        return np.column_stack([0.1 * share * again, 0.25 * share, np.full(len(candidates), 0.2)])

    rows = grid("8B", LENGTHS, ((64, 16), (96, 16), (32, 24), (96, 48)))
    cells = chosen(rows, attention, most=10)
    added = [c for c in cells if c not in chosen(rows, attention, most=8)]
    assert any(c.host_mem_gib == 32 and c.seq_len == LENGTHS[-1] for c in added)


def test_candidates_of_many_lengths_and_models_are_spread_over_them():
    rows = [row for model in ("1B", "8B", "15B") for row in grid(model, LENGTHS)]
    candidates = candidate_cells(rows)
    assert 42 <= len(candidates) <= 42 + 8  # what is taken at once may come on top
    assert {c.seq_len for c in candidates} >= {LENGTHS[0], LENGTHS[-1]}
    assert {c.model for c in candidates} == {"1B", "8B", "15B"}


def test_four_pairs_from_the_shortest_to_the_longest_are_taken_whatever_they_tell():
    cells = chosen(grid("8B", LENGTHS), most=8)
    assert sorted({c.seq_len for c in cells}) == [LENGTHS[i] for i in (0, 4, 7, 11)]
    assert {(c.host_mem_gib, c.dev_mem_gib) for c in cells} == {(32, 16), (64, 48)}


def test_every_model_has_a_pair():
    rows = [row for i in range(7) for row in grid(f"m{i}", LENGTHS[:3])]
    assert len({c.model for c in chosen(rows)}) == 7


def test_the_rest_are_the_rows_that_tell_what_the_others_do_not():
    def only_one_tells(candidates):
        """A second parameter moves nothing but the busiest row at one length."""
        telling = [(c.seq_len, c.host_mem_gib) == (LENGTHS[2], 64) for c in candidates]
        busy = [telling[i] and c.dev_mem_gib == 16 for i, c in enumerate(candidates)]
        return np.column_stack([np.full(len(candidates), 0.1), 0.05 * np.array(busy)])

    told = chosen(grid("8B", LENGTHS), only_one_tells, most=9)[8]
    assert (told.seq_len, told.host_mem_gib, told.dev_mem_gib) == (LENGTHS[2], 64, 16)


def test_what_a_row_tells_is_reckoned_against_the_noise_that_its_sweep_shares():
    """One row more: by brute force over all of them, the one that narrows the most."""
    rows = grid("8B", LENGTHS[:5])
    candidates = candidate_cells(rows)
    effects = np.random.default_rng(0).normal(0.0, 0.03, (len(candidates), 3))
    cells = informative_cells(candidates, effects, 9)

    def told(some):
        index = [candidates.index(c) for c in some]
        noise = np.array(
            [
                [0.005**2 * (a == b) + 0.012**2 * (a.seq_len == b.seq_len) for b in some]
                for a in some
            ]
        )
        seen = effects[index]
        return np.linalg.slogdet(np.eye(3) + seen.T @ np.linalg.inv(noise) @ seen)[1]

    first = cells[:8]
    others = [c for c in candidates if c not in first]
    assert cells[8] == max(others, key=lambda c: told([*first, c]))


def test_failed_rows_do_not_count():
    rows = [*grid("8B", LENGTHS[:1]), Row("8B", 512, 8, 8, "failed")]
    assert {(c.host_mem_gib, c.dev_mem_gib) for c in chosen(rows)} == {(32, 16), (64, 16), (64, 48)}


def test_a_table_without_success_is_refused():
    with pytest.raises(CalibrationError, match="no successful row"):
        candidate_cells([Row("8B", 512, 8, 8, "failed")])
