"""What `whatif`, `sweep`, `explore` and `cost` do, from Python."""

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from twinstream.cost.bill import Bill, Prices, bill_of
from twinstream.cost.time import RunTime, TimedRun, rates_of, time_of, timed_sizes
from twinstream.cost.work import CountedRun, RunWork, counted_sizes, model_of_layers, work_of
from twinstream.hardware_profiles.clusters.loader import load_cluster
from twinstream.hardware_profiles.loader import load_machine
from twinstream.schedule.errors import ArgumentError, did_you_mean
from twinstream.schedule.node import Node, from_options
from twinstream.study.answer import Answer
from twinstream.study.explore.answers import ExploreError
from twinstream.study.query import Query
from twinstream.study.questions import query_of
from twinstream.study.sweep.config import config_of, load_config
from twinstream.study.sweep.sweep import SweepSettings, Swept, run_sweep
from twinstream.study.values import Value

_Run = TypeVar("_Run", bound=Node)


def query(**values: Value) -> Query:
    """A question about a training step, by the names of `plan`'s options.

    With `machine` it is of one device, with `cluster`, `gpus` and `global_batch` of many GPUs.
    Numbers of profiles are changed on the way: `query(...).changed({"machine.hbm_bytes_per_s":
    4e12})`. `answer()` plans and predicts it.

    >>> query(model="tiny", machine="cpu", seq_len=64, policy="resident").subject.title
    'tiny on cpu, policy resident'

    Raises:
        TwinstreamError: a name or a value is wrong, or one is missing.
    """
    return query_of(values)


def sweep(
    config: str | Path | Mapping[str, Any],
    folder: str | Path,
    *,
    num_jobs: int | None = None,
    ray_address: str | None = None,
) -> Swept:
    """Answer every combination of values: `twinstream sweep CONFIG -o FOLDER`.

    Rows that are in the folder already are not made again.

    Args:
        config: a TOML file, or what one would hold: `{"fixed": {...}, "axes": {...}}`.
        folder: where rows.csv, and a page go.
        num_jobs: processes; by default one a core.
        ray_address: of a Ray cluster to run on instead.

    Raises:
        TwinstreamError: the config, the folder or the Ray cluster is not usable.
    """
    if isinstance(config, Mapping):
        wanted = config_of(config, source="the sweep", folder=Path())
    else:
        wanted = load_config(Path(config))
    jobs = num_jobs or os.cpu_count() or 1
    return run_sweep(wanted, SweepSettings(Path(folder), jobs, ray_address))


def explore(
    models: Sequence[str | Path] = (),
    machines: Sequence[str | Path] = (),
    *,
    host: str = "127.0.0.1",
    port: int = 8050,
    price_per_gpu_hour: float | str | Mapping[str, float] | None = None,
) -> None:
    """Serve the explorer's page until Ctrl-C.

    Args:
        models: config.json files that it offers beside the shipped models.
        machines: TOML profiles that it offers beside the shipped ones.
        price_per_gpu_hour: of all, or by machine or cluster, for the money of a billion tokens.

    Raises:
        TwinstreamError: Dash is not installed, a file is wrong, or the address is taken.
    """
    require_dash()
    from twinstream.study.explore.app import serve

    price = price_per_gpu_hour
    if isinstance(price, Mapping):
        price = ",".join(f"{name}={number}" for name, number in price.items())
    serve(models, machines, host=host, port=port, price="" if price is None else str(price))


def require_dash() -> None:
    """
    Raises:
        ExploreError: Dash is not installed.
    """
    if find_spec("dash") is None:
        raise ExploreError(
            "the explorer needs dash, which is not installed: pip install 'twinstream[explore]'"
        )


def cost_of_run(
    answer: Answer,
    num_tokens: float,
    *,
    price_per_gpu_hour: float | str | Mapping[str, float] | None = None,
    **prices: float,
) -> Bill:
    """What training on so many tokens takes at an answer's speed: days, GPU-hours, money.

    Args:
        price_per_gpu_hour: of all, or by machine or cluster as `"h100=2.5,b200=6"` or a mapping.
        prices: `checkpoint_s`, `checkpoint_interval_s`, `mtbf_hours`, `restart_s`, for goodput.

    Raises:
        TwinstreamError: a number is wrong, or one that goodput needs is missing.
    """
    given = {"price_per_gpu_hour": price_per_gpu_hour, **prices}
    charged = from_options(Prices, given)
    return bill_of(num_tokens / answer.tokens_per_s, answer.num_gpus, charged, answer.place_names)


def cost_work(model: str | None = None, **sizes: Any) -> RunWork:
    """Return what a run computes and moves on a mesh, by arithmetic alone.

    Args:
        model: a preset or a config.json, in place of the sizes of layers.
        sizes: fields of `CountedRun`, as `num_layers=80, d_model=8192, dataset_tokens=15e12`.

    Raises:
        TwinstreamError: a size is unknown or wrong, or they do not fit together.
    """
    if model is not None:
        sizes = counted_sizes(model_of_layers(model, sizes.get("seq_len", 1))) | sizes
    return work_of(_run_of(CountedRun, sizes))


def cost_time(
    model: str | None = None,
    machine: str | None = None,
    cluster: str | None = None,
    **sizes: Any,
) -> RunTime:
    """Return how long a run takes: what `twinstream cost` shows, by arithmetic alone.

    Args:
        model: a preset or a config.json, in place of the sizes of layers.
        machine, cluster: a profile, in place of rates; of several GPUs a cluster.
        sizes: fields of `TimedRun`, as `dataset_tokens=15e12, pp=8, dp=256, tp=8`.

    Raises:
        TwinstreamError: a size is unknown or wrong, or they do not fit together.
    """
    if model is not None:
        seq_len = sizes.setdefault("seq_len", TimedRun.model_fields["seq_len"].default)
        sizes = timed_sizes(model_of_layers(model, seq_len), seq_len) | sizes
    if machine is not None:
        sizes = rates_of(load_machine(machine)) | sizes
    if cluster is not None:
        sizes = rates_of(load_cluster(cluster)) | sizes
    return time_of(_run_of(TimedRun, sizes))


def _run_of(kind: type[_Run], sizes: Mapping[str, Any]) -> _Run:
    for name in sizes:
        if name not in kind.model_fields:
            near = did_you_mean(name, kind.model_fields)
            raise ArgumentError(f"unknown size '{name}': {near}")
    return from_options(kind, sizes)
