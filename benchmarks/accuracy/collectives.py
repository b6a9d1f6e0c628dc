"""How far curves of collectives are off: measured nccl-tests in, a table out.

python -m benchmarks.accuracy.collectives nccl_curves.csv [--ranks 8]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.accuracy.withheld import (
    WithheldErrors,
    errors_of,
    mean_by_gpu,
)
from twinstream.hardware_profiles.collectives.reading import read_points

_HEAD = "| GPU | ranks | collective | three lines | chosen | every second size withheld |"


def table(errors: Sequence[WithheldErrors]) -> str:
    """Markdown: a row for each GPU type, number of ranks and collective, then their means."""
    lines = [_HEAD, "|---|---|---|---|---|---|"]
    for one in errors:
        shares = (one.lines_error, one.error, one.withheld_error)
        told = " | ".join(f"{share:.1%}" for share in shares)
        lines.append(f"| {one.gpu} | {one.ranks} | {one.collective} | {told} |")
    return "\n".join(lines)


def means(errors: Sequence[WithheldErrors]) -> str:
    """Markdown: a row for each GPU type and number of ranks, over all collectives."""
    lines = ["| GPU | ranks | three lines | every second size withheld |", "|---|---|---|---|"]
    for ranks in sorted({one.ranks for one in errors}):
        for gpu, shares in mean_by_gpu(errors, ranks).items():
            lines.append(f"| {gpu} | {ranks} | {shares[0]:.1%} | {shares[1]:.1%} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--ranks", type=int, help="only this number of ranks")
    given = parser.parse_args(arguments)
    points = read_points(given.table)
    wanted = [point for point in points if given.ranks in (None, point.ranks)]
    errors = errors_of(wanted)
    assert sum(one.num_points for one in errors) <= len(wanted)
    print(means(errors), table(errors), sep="\n\n")


if __name__ == "__main__":
    main()
