"""A training run: prepared, started or gone on with, and what it comes to."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Any

from twinstream.api import require_torch
from twinstream.log.tensorboard import require_tensorboard
from twinstream.models.loss import loss_of
from twinstream.schedule.timeline import Timeline
from twinstream.training.amounts import every
from twinstream.training.callbacks import Callback, RunLog
from twinstream.training.loop import TrainingLoop
from twinstream.training.machine import Tell, detect_machine
from twinstream.training.model_opening import open_model, within_positions
from twinstream.training.options import TrainOptions
from twinstream.training.planning import recipe_without_kernels
from twinstream.training.preparing import Prepared, open_data, prepare
from twinstream.training.ranks.planning import require_possible
from twinstream.training.run.run_folder import TrainingFolder, TrainResult
from twinstream.training.run.stopping import Stop


class Trainer:
    """One run in one folder, on one device or on the ranks that its options ask for.

    Args:
        resume: go on from the folder's last checkpoint, of however many ranks; from the start
            where there is none yet.
        callbacks: told of steps, evaluations and checkpoints.
        tell: takes a line about what is going on before the first step, and warnings.
        timeout_s: how long a rank may keep the others waiting; by default 20 steps, a minute at
            least.

    Raises:
        TwinstreamError: there is no torch, the folder has another run, or ranks cannot do what the
            options ask for.
    """

    def __init__(
        self,
        options: TrainOptions,
        *,
        resume: bool = False,
        callbacks: Sequence[Callback] = (),
        tell: Tell = lambda line: None,
        timeout_s: float | None = None,
    ) -> None:
        require_torch()
        require_possible(options)
        self._callbacks, self._tell = tuple(callbacks), tell
        self._timeout_s = timeout_s
        self.stop = Stop(tell)
        every("save_every", options.save_every)  # raises before any work, as do the next lines
        loss_of(options.loss)
        if options.tensorboard:
            require_tensorboard()
        self._folder = TrainingFolder(options, resume=resume)
        self._options = self._folder.options
        self._prepared: Prepared | None = None
        self._loop: TrainingLoop | None = None

    @property
    def steps_done(self) -> int:
        """Before this start, by the checkpoint that is gone on from."""
        return self._folder.steps_done

    @property
    def pids(self) -> list[int]:
        """Processes of the ranks, while they run; none of one device."""
        return [] if self._loop is None else self._loop.pids

    def prepare(self, *, weights: bool = True) -> Prepared:
        """OpenedModel, data, layout and plan; nothing is written, and it is done once.

        Args:
            weights: False lets the model's weights be missing, for who does not train.

        Raises:
            TwinstreamError: something cannot be used, or nothing fits.
        """
        if self._prepared is None:
            from twinstream.executor.ranks.gpus import require_gpus
            from twinstream.executor.run.execute import choose_backend

            options, num_ranks = self._options, self._options.ranks or 1
            model = open_model(options, weights=weights)
            options = within_positions(options, model.spec, self._tell)
            backend = choose_backend(options.backend)
            if backend == "cuda" and num_ranks > 1:
                require_gpus(options.ranks_on_host)
            self._tell("reading the data")
            data = open_data(options, model, self._folder.files.tokens)
            if self._folder.checkpoint is None:
                recipe_without_kernels(options, model.spec)  # raises before anything is measured
            self._tell("looking at this machine")
            here = detect_machine(
                options, options.output, backend, model.spec.dtype, self._tell, model.spec.head_dim
            )
            if weights:
                here.require_own_profile()
            checkpoint = self._folder.checkpoint
            self._prepared = prepare(options, here, model, data, checkpoint, self._tell)
        return self._prepared

    def train(self) -> TrainResult:
        """Train until the last step, or until stopped; the state is in a checkpoint then.

        Raises:
            RunEndedError: the data ends it, or the last checkpoint cannot be written.
            TwinstreamError: what a run can meet: no memory, a full disk, a loss that is no number;
                of one of several ranks it says which.
        """
        prepared, done = self.prepare(), self.steps_done
        needed_bytes = prepared.plan.checkpoint_bytes + prepared.carried_bytes
        files = self._folder.files
        with ExitStack() as stack:
            stack.enter_context(self._folder.begun(prepared, needed_bytes))
            if done < prepared.num_steps:
                prepared.plan.write(files)
            for callback in self._callbacks:
                callback.on_start(prepared)
            board = prepared.options.tensorboard
            log = RunLog(files, done, self._callbacks, tensorboard=board)
            stack.enter_context(log)
            stack.enter_context(self.stop.heeded())
            self._loop = loop = TrainingLoop(
                prepared, self._folder, log.record, self.stop, self._tell,
                timeout_s=self._timeout_s,
            )  # fmt: skip
            stack.enter_context(closing(loop))
            timeline = loop.train() if done < prepared.num_steps else None
            result = self._result(loop, timeline)
            if loop.hooks.failure is not None:
                raise self._folder.ended(loop.hooks.failure, result)
            return result

    def _result(self, loop: TrainingLoop, timeline: Timeline | None) -> TrainResult:
        """What it came to; the comparison with what was predicted is written beside the log."""
        prepared, stream, rates = self.prepare(), loop.stream, loop.tokens_per_s[1:]
        step, model = self._folder.reached(loop.hooks.checkpoint, prepared.num_steps)
        plan, measured, disturbed = prepared.plan, None, None
        if timeline is not None:
            measured = plan.summary(timeline)
            disturbed = plan.write_comparison(self._folder.files, timeline)
        return TrainResult(
            folder=self._folder.files.folder, model=model, step=step,
            loss=loop.loss, eval_loss=loop.hooks.eval_loss, signal=self.stop.signal,
            fill=1.0 if stream is None else stream.fill,
            waited_s=0.0 if stream is None else stream.waited_s,
            skipped=() if stream is None else tuple(stream.skipped),
            predicted_tokens_per_s=plan.tokens_per_s,
            measured_tokens_per_s=median(rates) if rates else None,
            predicted=plan.summary(), measured=measured, disturbed=disturbed,
        )  # fmt: skip


def train(
    model: str | Path,
    data: str | Path | Sequence[str | Path],
    output: str | Path,
    *,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> TrainResult:
    """Train a model on data: `twinstream train MODEL DATA... -o DIR`.

    Args:
        model: a Hugging Face folder, a config.json (random weights) or a preset.
        data: files and folders: .txt, .jsonl, .parquet, .bin; `PATH=WEIGHT` gives a weight. Of a
            model that takes tensors of samples, folders of .npy, or .safetensors.
        output: the folder of the run, which is made.
        resume: go on from the last checkpoint in `output`.
        callbacks: told of steps, evaluations and checkpoints.
        options: fields of `TrainOptions`.

    Raises:
        TwinstreamError: an option, a file or the plan; a loss that is no number; a full disk.
    """
    several = [data] if isinstance(data, str | Path) else list(data)
    given = {"model": str(model), "data": [str(one) for one in several], "output": output}
    wanted = TrainOptions.of(given | options)
    return Trainer(wanted, resume=resume, callbacks=callbacks).train()
