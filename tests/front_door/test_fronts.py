"""The Pareto front of a sweep's rows, against its definition tried on all pairs."""

from random import Random

from twinstream.study.sweep.fronts import front_figure, fronts


def rows_of(count: int, seed: int) -> list[dict[str, str]]:
    random = Random(seed)
    return [
        {
            "tokens_per_s": str(random.randint(1, 9)),
            "money_per_billion_tokens": str(random.randint(1, 6)),
            "device_peak_bytes": str(2**30 * random.randint(1, 6)),
            "host_peak_bytes": "7",
            "num_gpus": "",
        }
        for _ in range(count)
    ]


def test_on_the_front_is_what_nothing_beats() -> None:
    for seed in range(30):
        rows = rows_of(12, seed)
        found = fronts(rows, [str(number) for number in range(12)])
        assert [one.cost.column for one in found] == [
            "money_per_billion_tokens",
            "device_peak_bytes",
        ]
        for front in found:
            on_line = {front.points[place] for place in front.best}
            for paid, speed in front.points:
                beaten = any(
                    other_paid <= paid and other >= speed and (other_paid, other) != (paid, speed)
                    for other_paid, other in front.points
                )
                assert ((paid, speed) in on_line) is not beaten
            assert len(front.best) == len(on_line)


def test_the_figure_has_every_row_once() -> None:
    rows = rows_of(12, 1)
    front = fronts(rows, [f"cell {number}" for number in range(12)])[0]
    figure = front_figure(front)
    told = [text for trace in figure.data for text in trace.text]
    assert sorted(told) == sorted(f"cell {number}" for number in range(12))


def test_rows_that_cost_the_same_have_no_front() -> None:
    rows = [
        row | {"money_per_billion_tokens": "3", "device_peak_bytes": "5"} for row in rows_of(4, 2)
    ]
    assert fronts(rows, list("abcd")) == []
