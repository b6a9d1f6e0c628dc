"""On how many GPUs to train where nobody says so."""

from twinstream.training.options import TrainOptions
from twinstream.training.preparing import Tell
from twinstream.training.ranks.refusals import what_is_of_one_device


def on_all_gpus(options: TrainOptions, tell: Tell) -> TrainOptions:
    """With a rank for each GPU of this machine, unless it is said how many.

    Not yet run on a GPU (see docs/benchmarks/README.md).
    """
    if options.ranks is not None or options.backend == "cpu":
        return options
    from twinstream.executor.ranks.gpus import num_gpus

    found = num_gpus()
    if found < 2:
        return options
    if (what := what_is_of_one_device(options)) is not None:
        tell(f"training on one of {found} GPUs: several do not do {what} yet")
        return options
    tell(f"training on all {found} GPUs of this machine; --ranks 1 takes one of them")
    return options.model_copy(update={"ranks": found})
