"""Curves from points: lines that are found again, tables, the error on sizes withheld."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.accuracy.withheld import errors_of, mean_by_gpu
from twinstream.hardware_profiles.collectives.fitting import (
    arrays,
    by_series,
    fit_curves,
    fit_form,
    fit_lines,
    form_of,
    least_of,
)
from twinstream.hardware_profiles.collectives.reading import CollectivePoint, chosen, read_points
from twinstream.hardware_profiles.errors import CollectiveTableError

EIGHT_GPUS = Path(__file__).with_name("nccl_eight_gpus.csv")
ERRATIC = "L40S"
SIZES = np.array([4.0**k for k in range(4, 16)])


@pytest.fixture(scope="module")
def points():
    return read_points(EIGHT_GPUS)


@pytest.mark.parametrize("num_lines", [1, 2, 3])
def test_lines_are_found_again(num_lines):
    truth = ((5e3, 1.0), (2e4, 0.05), (3e5, 0.01))[:num_lines]
    times = least_of(truth, SIZES)
    found = fit_lines(SIZES, times, num_lines)
    assert np.array(found) == pytest.approx(np.array(truth), rel=1e-6)


def test_three_lines_are_no_more_than_the_data_needs():
    times = least_of(((5e3, 0.1),), SIZES)
    assert least_of(fit_lines(SIZES, times, 3), SIZES) == pytest.approx(times)


def test_one_wild_point_hardly_moves_a_line():
    times = least_of(((5e3, 0.1),), SIZES)
    times[3] *= 3
    (line,) = fit_lines(SIZES, times, 1)
    assert np.array(line) == pytest.approx(np.array((5e3, 0.1)), rel=0.02)


def test_neither_latency_nor_cost_of_a_byte_is_negative():
    falling = np.linspace(100.0, 50.0, len(SIZES))
    ((alpha, beta),) = fit_lines(SIZES, falling, 1)
    assert alpha > 0 and beta == 0
    ((alpha, beta),) = fit_lines(SIZES, SIZES**1.2, 1)
    assert alpha == 0 and beta > 0


def test_a_table_has_the_middle_of_repeated_sizes_in_ratio():
    form = form_of("table", np.array([1.0, 2.0, 2.0]), np.array([5.0, 10.0, 40.0]))
    assert form.points == ((1.0, 5.0), (2.0, pytest.approx(20.0)))


def test_the_form_is_the_one_that_errs_least_on_sizes_it_has_not_seen():
    # A jump upwards, then flat: no least of lines, whose steps flatten, but a table can.
    times = np.where(SIZES < 4.0**10, 1e4, 9e4) + 0.001 * SIZES
    form, error = fit_form(SIZES, times)
    assert form.points and error is not None
    straight, nothing = fit_form(SIZES, least_of(((5e3, 0.1), (1e5, 0.01)), SIZES))
    assert len(straight.lines) == 2 and nothing < 1e-6


def test_each_visible_gpu_but_the_erratic_one_is_within_five_percent_at_eight_ranks(points):
    """The least of up to three lines, on the points that it was fitted to."""
    means = {}
    for gpu in sorted({point.gpu for point in points}):
        errors = []
        for series in by_series(chosen(points, gpu)).values():
            size_bytes, time_ns = arrays(series)
            errors.append(form_of("lines 3", size_bytes, time_ns).errors(size_bytes, time_ns))
        means[gpu] = float(np.concatenate(errors).mean())
    assert len(means) == 7
    assert {gpu for gpu, error in means.items() if error > 0.05} <= {ERRATIC}
    assert means["H100 80GB HBM3"] == pytest.approx(0.034, abs=0.006)


def test_one_line_is_not_enough(points):
    series = by_series(chosen(points, "A100-SXM4-80GB"))["all_reduce", 8, 8, "half"]
    size_bytes, time_ns = arrays(series)
    forms = {num_lines: form_of(f"lines {num_lines}", size_bytes, time_ns) for num_lines in (1, 3)}
    errors = {n: form.errors(size_bytes, time_ns).mean() for n, form in forms.items()}
    assert errors[1] > 0.08 > 0.05 > errors[3]


def test_sizes_that_were_withheld_are_predicted_too(points):
    """Every second size withheld, sixteen times from one kept size to the next."""
    some = [p for p in chosen(points, "B200") if p.collective in ("all_reduce", "reduce_scatter")]
    errors = errors_of(some)
    assert [(one.collective, one.num_points, one.num_withheld) for one in errors] == [
        ("all_reduce", 22, 10),
        ("reduce_scatter", 22, 10),
    ]
    assert all(one.withheld_error < 0.09 for one in errors)
    lines, withheld = mean_by_gpu(errors, 8)["B200"]
    assert lines < 0.05 < withheld


def test_every_series_gets_a_curve_that_says_where_it_is_from(points):
    some = [p for p in chosen(points, "H200") if p.collective == "all_gather"]
    fitted = fit_curves(some, "a test of 2026")
    assert [(one.curve.dtype, one.num_points) for one in fitted] == [("half", 11), ("int8", 11)]
    for one in fitted:
        curve = one.curve
        assert (curve.least_bytes, curve.most_bytes) == (512, 2**29)
        assert curve.source.startswith("a test of 2026; 11 points, mean error")
        assert curve.kind == ("measured" if curve.points else "fitted")
        assert one.left_out_error is not None and one.left_out_error < 0.15
    assert fitted == fit_curves(reversed(some), "a test of 2026")


def test_a_single_size_is_no_curve():
    point = CollectivePoint(gpu="", collective="all_gather", ranks=2, ranks_per_node=2, dtype=None,
                            size_bytes=8, time_us=1.0)  # fmt: skip
    with pytest.raises(CollectiveTableError, match="all_gather of 2 ranks has 1 size"):
        fit_curves([point], "a test")
