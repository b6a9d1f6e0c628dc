"""Files of measured collectives: a CSV, or what nccl-tests printed."""

from pathlib import Path

from twinstream.hardware_profiles.collectives.nccl_text import is_nccl_text, nccl_points
from twinstream.hardware_profiles.collectives.points import CollectivePoint
from twinstream.hardware_profiles.collectives.points_csv import NEEDED, csv_points
from twinstream.hardware_profiles.errors import CollectiveTableError
from twinstream.schedule.files import read_text


def read_points(path: Path) -> tuple[CollectivePoint, ...]:
    """The points of a CSV or of the text that nccl-tests prints; which of both, its content says.

    Raises:
        CollectiveTableError: it cannot be read, is neither, or holds nothing.
    """
    try:
        text = read_text(path, "utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise CollectiveTableError(f"cannot read {path}: {why or error}") from None
    if not text.strip():
        raise CollectiveTableError(
            f"{path} is empty; give what nccl-tests printed, or a CSV with the columns "
            f"{', '.join(NEEDED)}"
        )
    return nccl_points(text, path.name) if is_nccl_text(text) else csv_points(text, path.name)
