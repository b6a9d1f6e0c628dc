"""Change a schedule's costs by unequal loads of experts: how full their last tiles are."""

import json
from math import ceil
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from twinstream.schedule.cost import GROUPED_TILE_ROWS, Work
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import read_text, reason_of

UNIFORM = "uniform"


class LoadError(TwinstreamError):
    """Loads of experts that cannot be read, or are of another model."""


def read_load(path: Path) -> tuple[float, ...]:
    """Rows, or shares of rows, that each expert gets: a JSON list of numbers, one for each.

    Raises:
        LoadError: the file cannot be read, or is no such list.
    """
    try:
        found = TypeAdapter(tuple[float, ...]).validate_python(json.loads(read_text(path)))
    except OSError as error:
        raise LoadError(f"--load {path} cannot be read: {reason_of(error)}") from None
    except (ValueError, RecursionError, ValidationError):
        raise LoadError(
            f"--load {path} is no JSON list of numbers, the rows that each expert gets, as "
            "[120, 80, 95, 105]; or write --load uniform"
        ) from None
    if not found or min(found) < 0 or not 0 < sum(found) < float("inf"):
        raise LoadError(f"--load {path}: loads are 0 or more, and some are more")
    return found


def with_load(schedule: RankSchedule, load: tuple[float, ...]) -> RankSchedule:
    """The same schedule where experts get so many rows, in these shares, in every layer.

    Bytes and FLOPs stay; an expert's rows fill whole tiles.

    Raises:
        LoadError: the model has no experts, or another number of them.
    """
    counts = {
        work.shape[3] for call in schedule.calls.values() for work in call.cost if _is_tiled(work)
    }
    if counts != {len(load)}:
        has = f"{counts.pop()} experts" if counts else "no experts in one launch (--kernels triton)"
        raise LoadError(f"--load has {len(load)} experts, and the schedule's model has {has}")
    calls = {
        name: call.model_copy(update={"cost": tuple(_loaded(work, load) for work in call.cost)})
        for name, call in schedule.calls.items()
    }
    return schedule.model_copy(update={"calls": calls})


def _is_tiled(work: Work) -> bool:
    return work.unit == "grouped_matmul" and work.launches == 1


def _loaded(work: Work, load: tuple[float, ...]) -> Work:
    """With as many rows of an expert as even loads have that waste as much of their tiles."""
    if not _is_tiled(work):
        return work
    each, *others = work.shape
    rows, total = each * len(load), sum(load)
    tiles = sum(ceil(rows * share / total / GROUPED_TILE_ROWS) for share in load)
    padding = tiles * GROUPED_TILE_ROWS / rows - 1.0
    alike = round(GROUPED_TILE_ROWS / 2 / padding) if padding > 0 else rows
    return work.model_copy(update={"shape": (max(1, alike), *others)})
