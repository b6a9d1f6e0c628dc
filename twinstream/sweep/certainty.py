"""How sure a sweep's figures are, for captions: errors of its machines, and their order."""

from collections.abc import Mapping, Sequence

from twinstream.measures.uncertainty import Speed, Uncertainty, order_note
from twinstream.sweep.cell import OK

Rows = Sequence[Mapping[str, str]]


def errors_note(rows: Rows) -> str:
    """The expected error of each machine's predictions; empty where nothing is predicted."""
    found = {row["machine"]: error_text(row) for row in rows if _is_certain(row)}
    told = set(found.values())
    if len(told) < 2:
        return f"Predicted, {told.pop()}." if told else ""
    return f"Predicted: {', '.join(f'{name} {short}' for name, short in found.items())}."


def error_text(row: Mapping[str, str]) -> str:
    """The expected error of a row that has a plan, for the side of its figures."""
    return _uncertainty(row).short


def ranking_note(rows: Rows) -> str:
    """What of the order of machines, by the fastest row of each, is not certain."""
    fastest: dict[str, Speed] = {}
    for row in rows:
        if not _is_certain(row):
            continue
        speed = Speed(float(row["tokens_per_s"]), _uncertainty(row))
        known = fastest.get(row["machine"])
        if known is None or speed.tokens_per_s > known.tokens_per_s:
            fastest[row["machine"]] = speed
    return order_note(fastest) or ""


def _is_certain(row: Mapping[str, str]) -> bool:
    """Whether it has figures and is known how far they may be off; a cluster's are not."""
    return row["status"] == OK and "expected_error_mean" in row


def _uncertainty(row: Mapping[str, str]) -> Uncertainty:
    mean = row["expected_error_mean"]
    return Uncertainty.model_validate(
        {
            "mean": float(mean) if mean else None, "worst": None,
            "kind": row["expected_error_kind"], "source": "",
        }
    )  # fmt: skip
