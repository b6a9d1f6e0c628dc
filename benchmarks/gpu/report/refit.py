"""`python -m benchmarks.gpu.report.refit`: a campaign's profile from its samples, fitted anew.

The samples of a probe are kept with the results. So another form of curve is tried on what was
measured, without the device.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated

import typer

from benchmarks.gpu.exits import run_app
from benchmarks.gpu.jobs.results import KernelsFound, ProbeFound, Results, SampleRatio
from benchmarks.gpu.jobs.store import CampaignError, read_results
from twinstream.executor.probe.chains import PRESETS, expert_chains, probe_chains
from twinstream.executor.probe.cuda import link_numbers, with_general
from twinstream.executor.probe.tasks.curves import Ceilings, CurveFit, fit_curves
from twinstream.executor.probe.tasks.task_samples import TaskSample, listed_grouped, listed_samples
from twinstream.executor.probe.timing.fit import Line, fit_link
from twinstream.hardware_profiles.loader import load_machine, save_machine
from twinstream.hardware_profiles.schema import Machine, Number
from twinstream.schedule.cost import Work


def refit(results: Results, probed: Machine) -> tuple[Machine, CurveFit]:
    """The profile with today's curves, and how well they give the samples.

    Raises:
        CampaignError: nothing was probed, or today's probe takes other samples.
    """
    found, chosen = results.found("probe"), results.found("kernels")
    if not isinstance(found, ProbeFound) or not isinstance(chosen, KernelsFound):
        raise CampaignError("these results have no probe of a CUDA device")
    source = probed.efficiency["sustained"].source.partition("; ")[2]
    ceilings = Ceilings(
        flop_per_s=probed.rate("peak_bf16_flop_per_s"),
        hbm_bytes_per_s=probed.number("hbm_bytes_per_s"),
        copy_bytes_per_s=probed.rate("hbm_bytes_per_s"),
        launch_ns=probed.number("launch_latency_ns"),
    )
    samples = samples_of(found.samples, chosen)
    fit = fit_curves(samples, ceilings, source)
    numbers = _links(found, source) if found.links else {}
    return probed.model_copy(
        update={"efficiency": probed.efficiency | with_general(fit.curves), **numbers}
    ), fit


def _links(found: ProbeFound, source: str) -> dict[str, Number]:
    return link_numbers((line_of(found, "h2d"), line_of(found, "d2h")), source)


def line_of(found: ProbeFound, direction: str) -> Line:
    """The line of a direction's copies."""
    rates = [one for one in found.links if one.direction == direction]
    sizes = [float(one.size_bytes) for one in rates]
    return fit_link(direction, sizes, [one.size_bytes / one.gb_per_s for one in rates])


def samples_of(timed: Sequence[SampleRatio], chosen: KernelsFound) -> list[TaskSample]:
    """The samples with their work, which is that of today's probe of the same name.

    Names used to say less: those that several of today's share are told apart by their order, if
    there are as many.
    """
    models = {sample.name.split()[0] for sample in timed}
    listed = _listed(chosen, tuple(preset for preset in (*PRESETS, "tiny") if preset in models))
    named = dict([*_listed(chosen, PRESETS), *listed])  # of other presets attention was alone
    alike: dict[str, list[tuple[Work, ...]]] = {}
    for name, works in listed:
        alike.setdefault(_earlier_name(name), []).append(works)
    counts = Counter(sample.name for sample in timed)
    seen: Counter[str] = Counter()
    found = []
    for sample in timed:
        known = named.get(sample.name)
        if known is None:
            candidates = alike.get(sample.name, [])
            is_told = len({*candidates}) == 1 or len(candidates) == counts[sample.name]
            if not candidates or not is_told:
                raise CampaignError(
                    f"the results have {counts[sample.name]} sample(s) '{sample.name}', and the "
                    f"probe now takes {len(candidates)}: it was changed; measure again"
                )
            known = candidates[min(seen[sample.name], len(candidates) - 1)]
            seen[sample.name] += 1
        found.append(TaskSample(sample.name, known, sample.time_ns, sample.state))
    return found


def _listed(chosen: KernelsFound, presets: tuple[str, ...]) -> list[tuple[str, tuple[Work, ...]]]:
    """All that a probe of these presets could take, by name, in its order."""
    listed = [
        one
        for chain in probe_chains(chosen.kernels, presets)
        for one in listed_samples(chain, every_place=True)
    ]
    for other in chosen.others:
        kernels = chosen.kernels.model_copy(update={"attention": other, "deterministic": False})
        listed += [
            (name, works)
            for chain in probe_chains(kernels, presets)
            for name, works in listed_samples(chain, every_place=True)
            if name.startswith("attention")
        ]
    return listed + [
        one for chain in expert_chains(chosen.kernels) for one in listed_grouped(chain)
    ]


def _earlier_name(name: str) -> str:
    """As it was until November 2026: products without "+=", attention without heads, tasks without
    the tokens of a chunk."""
    if name.startswith("attention"):
        return name.rpartition(" ")[0]
    if name.startswith(("matmul", "grouped_matmul")):
        return name.removesuffix("+=")
    model, lengths, *task = name.split(" ")
    return " ".join([model, lengths.partition("/")[0], *task])


def _what(name: str) -> str:
    """A sample's kernel without its shape, whose form has changed."""
    alone = ("matmul", "grouped_matmul", "attention")
    return name.split()[0] if name.startswith(alone) else name.split()[-1]


def _command(
    campaign: Annotated[Path, typer.Argument(help="A campaign's --out.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile, TOML.")],
) -> None:
    """Fit the probed samples anew, write the profile, and say how far off its curves are."""
    machine, fit = refit(read_results(campaign), load_machine(campaign / "profile.toml"))
    save_machine(machine, output)
    by_kernel: dict[str, list[float]] = {}
    for name, ratio in fit.ratios.items():
        by_kernel.setdefault(_what(name), []).append(abs(1.0 / ratio - 1.0))
    for kernel, errors in sorted(by_kernel.items(), key=lambda one: -max(one[1])):
        far = f"mean error {mean(errors):6.1%}, worst {max(errors):6.1%}"
        print(f"{kernel:32} {len(errors):3} samples, {far}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    run_app(_command, arguments)


if __name__ == "__main__":
    main()
