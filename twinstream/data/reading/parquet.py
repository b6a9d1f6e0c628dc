"""Parquet files, by row groups; pyarrow is imported only here."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from twinstream.data.data_error import DataError, unreadable
from twinstream.data.shapes import FIELDS, NAME_THEM, ROWS


def row_groups(path: Path, columns: Sequence[str] = ()) -> list[tuple[int, int]]:
    """Number of rows, and bytes without compression, of each row group.

    Args:
        columns: that are read beside those of known names.

    Raises:
        DataError: pyarrow is missing, the file is damaged, or has none of the known columns.
    """
    file = _open(path)
    if not _known_columns(file, columns):
        raise DataError(
            f"{path} has no column of {ROWS}; it has "
            f"{', '.join(file.schema_arrow.names) or 'none'}: {NAME_THEM}"
        )
    groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    return [(group.num_rows, group.total_byte_size) for group in groups]


def bytes_of_group(path: Path, row_group: int) -> tuple[int, int]:
    """Return the bytes [first, end) of the file that the columns of a row group take.

    Raises:
        DataError: as `row_groups`.
    """
    group = _open(path).metadata.row_group(row_group)
    columns = [group.column(number) for number in range(group.num_columns)]
    starts = [
        min(offset for offset in (c.dictionary_page_offset, c.data_page_offset) if offset)
        for c in columns
    ]
    ends = [start + c.total_compressed_size for start, c in zip(starts, columns, strict=True)]
    return min(starts), max(ends)


def read_rows(
    path: Path, row_group: int, first: int, end: int, columns: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Rows [first, end) of a row group, in the known columns and these."""
    import pyarrow

    file = _open(path)
    try:
        table = file.read_row_group(row_group, columns=_known_columns(file, columns))
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"cannot read row group {row_group} of {path}: {error}") from None
    rows = cast("list[dict[str, Any]]", table.slice(first, end - first).to_pylist())
    return [{name: _without_nulls(value, "content") for name, value in row.items()} for row in rows]


def _without_nulls(value: Any, kept: str | None = None) -> Any:
    """Without keys that are null: Arrow gives an object those of all rows.

    What is `kept` is of messages, many of which have no content.
    """
    if isinstance(value, list):
        return [_without_nulls(one, kept) for one in value]
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None or k == kept}
    return value


def _known_columns(file: Any, columns: Sequence[str]) -> list[str]:
    return [name for name in file.schema_arrow.names if name in FIELDS or name in columns]


def _open(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise DataError(
            f"{path} needs the package `pyarrow`, which is not installed: pip install pyarrow"
        ) from None
    try:
        return pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is no parquet file, or damaged: {error}") from None
    except OSError as error:
        raise unreadable(path, error) from None
