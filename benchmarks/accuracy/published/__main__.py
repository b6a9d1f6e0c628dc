"""Write published tables as the one table of measured steps that `twinstream validate` reads.

python -m benchmarks.accuracy.published TABLE.csv... -o steps.csv
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.accuracy.published.reading import read_cluster_tables
from benchmarks.accuracy.published.writing import measured_steps_csv
from twinstream.fidelity.cluster_rows import read_measured_steps


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args(arguments)
    rows = read_cluster_tables(given.tables)
    given.output.write_text(measured_steps_csv(rows), encoding="utf-8")
    assert read_measured_steps([given.output]) == rows
    print(f"Wrote {len(rows)} steps to {given.output}.")


if __name__ == "__main__":
    main()
