"""`python -m benchmarks.gpu.report.checked`: what the check at a run's start leaves of the error.

A profile is scaled by what a campaign's probe measured of links, products and one attention, as
`train` does on a known GPU, and then predicts the campaign's steps, of which it has seen none.
"""

from collections.abc import Sequence
from statistics import mean
from typing import Annotated

import typer

from benchmarks.gpu.exits import run_app
from benchmarks.gpu.jobs.results import KernelsFound, ProbeFound, Results
from benchmarks.gpu.jobs.store import CampaignError
from benchmarks.gpu.report.refit import line_of, samples_of
from benchmarks.gpu.report.terms import (
    CampaignFile,
    HostMem,
    PlannedOn,
    Ran,
    TimelinesFile,
    error_of,
    rates_at_once,
    read_campaign,
)
from twinstream.executor.probe.cuda_links import Copies
from twinstream.executor.probe.known_check import Checked, scaled
from twinstream.hardware_profiles.loader import load_machine

_PRODUCT_ROWS, _PLACE = 8192, "8192/8192x1 "


def found_there(results: Results, cells: Sequence[Ran]) -> tuple[Checked, ...]:
    """What a check would have measured there, with the best attention and with each other one.

    Raises:
        CampaignError: nothing was probed on a CUDA device.
    """
    probe, chosen = results.found("probe"), results.found("kernels")
    if (
        not isinstance(probe, ProbeFound)
        or not isinstance(chosen, KernelsFound)
        or (kept_up := probe.sustained_flop_per_s) is None
    ):
        raise CampaignError("these results have no probe of a CUDA device")
    both = rates_at_once(cells)
    copies = Copies((line_of(probe, "h2d"), line_of(probe, "d2h")), (both["h2d"], both["d2h"]))
    attention = [
        sample
        for sample in samples_of(probe.samples, chosen)
        if sample.name.startswith("attention") and _PLACE in f"{sample.name} "
    ]
    return tuple(
        Checked(copies, kept_up, _PRODUCT_ROWS, of_one)
        for name in (chosen.kernels.attention, *chosen.others)
        if (of_one := tuple(one for one in attention if f" {name} " in one.name))
    )


def _command(
    campaign: CampaignFile, timelines: TimelinesFile, planned_on: PlannedOn,
    machine: Annotated[str, typer.Option(help="The profile that is checked.")] = "h200_datasheet",
    host_mem: HostMem = "100GiB",
) -> None:  # fmt: skip
    """Predict each measured step before and after a check."""
    results, cells = read_campaign(campaign, timelines, planned_on, host_mem)
    first, *others = found_there(results, cells)
    base = load_machine(machine)
    checks = [scaled(base, found) for found in (first, *others)]
    for _, text in checks:
        print(text)
    errors: dict[str, list[tuple[float, float]]] = {}
    for ran in cells:
        # a run checks the attention that it uses
        used = checks[-1 if "sdpa_cudnn" in ran.key else 0][0]
        pair = error_of(ran, base, 0.0), error_of(ran, used, 0.0)
        errors.setdefault(ran.key.split()[0], []).append(pair)
        print(f"{ran.key:30} before {pair[0]:+6.1%}, checked {pair[1]:+6.1%}")
    for model, pairs in errors.items():
        columns = [[abs(error) for error in column] for column in zip(*pairs, strict=True)]
        before, after = (f"mean {mean(one):.1%}, worst {max(one):.1%}" for one in columns)
        print(f"{model}: before {before}; checked {after}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    run_app(_command, arguments)


if __name__ == "__main__":
    main()
