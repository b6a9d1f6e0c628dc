"""A training run on several ranks: prepared, started or gone on with, and what it comes to."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

from twinstream.api import require_torch
from twinstream.hardware_profiles.clusters.loader import save_with_node
from twinstream.log.metrics import StepMetrics
from twinstream.log.tensorboard import require_tensorboard
from twinstream.schedule.analysis.comparison import compare
from twinstream.schedule.cluster.cluster_timeline import ClusterTimeline
from twinstream.schedule.files import write_document
from twinstream.training.amounts import every
from twinstream.training.callbacks import Callback
from twinstream.training.machine import machine_here
from twinstream.training.opening import open_model
from twinstream.training.options import TrainOptions
from twinstream.training.preparing import Tell
from twinstream.training.ranks.planning import RanksPlan
from twinstream.training.ranks.preparing import RanksPrepared, prepare_ranks
from twinstream.training.ranks.ranks_run import RanksRun
from twinstream.training.ranks.refusals import require_possible
from twinstream.training.run.run_folder import RunFolder, RunResult
from twinstream.training.run.run_log import RunLog
from twinstream.training.run.stopping import Stop


@dataclass(frozen=True, kw_only=True)
class RanksResult(RunResult):
    """What a run on several ranks came to.

    Attributes:
        predicted_tokens_per_s, measured_tokens_per_s: of a step; measured is the median but for
            the first, and None where there was no other.
    """

    predicted_tokens_per_s: float
    measured_tokens_per_s: float | None


class RanksTrainer:
    """One run in one folder, on the ranks that its options ask for; as `Trainer`.

    Args:
        resume: go on from the folder's last checkpoint, of however many ranks.
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
        self._timeout_s = timeout_s
        require_possible(options)
        self._options, self._callbacks, self._tell = options, tuple(callbacks), tell
        self.stop = Stop(tell)
        every("save_every", options.save_every)  # raises before any work, as does the next line
        if options.tensorboard:
            require_tensorboard()
        self._folder = RunFolder(options, resume=resume)
        self._prepared: RanksPrepared | None = None
        self._run: RanksRun | None = None

    @property
    def steps_done(self) -> int:
        """Before this start, by the checkpoint that is gone on from."""
        return self._folder.steps_done

    @property
    def pids(self) -> list[int]:
        """Of the ranks' processes, while they run."""
        return [] if self._run is None else self._run.pids

    def prepare(self, *, weights: bool = True) -> RanksPrepared:
        """Model, data, layout and plan; nothing is written, and it is done once.

        Args:
            weights: False lets the model's weights be missing, for who does not train.

        Raises:
            TwinstreamError: something cannot be used, or nothing fits.
        """
        if self._prepared is None:
            from twinstream.executor.ranks.gpus import require_gpus
            from twinstream.executor.run.execute import choose_backend

            options = self._options
            model = open_model(options, weights=weights)
            if (backend := choose_backend(options.backend)) == "cuda":
                require_gpus(options.ranks or 1)
            self._tell("looking at this machine")
            here = machine_here(options, options.output, backend, model.spec.dtype, self._tell)
            self._prepared = prepare_ranks(
                options, here, model, self._folder.checkpoint, self._tell
            )
        return self._prepared

    def train(self) -> RanksResult:
        """Train until the last step, or until stopped; the state is in a checkpoint then.

        Raises:
            RunEndedError: the data ends it, or the last checkpoint cannot be written.
            TwinstreamError: what a run can meet; of a rank it says which.
        """
        prepared, done = self.prepare(), self.steps_done
        seen = _Speed()
        with ExitStack() as stack:
            stack.enter_context(self._folder.begun(prepared, prepared.plan.checkpoint_bytes))
            if done < prepared.num_steps:
                self._write_plan(prepared.plan)
            for callback in self._callbacks:
                callback.on_start(prepared)
            board = prepared.options.tensorboard
            looking = [seen, *self._callbacks]
            log = stack.enter_context(RunLog(self._folder.files, done, looking, tensorboard=board))
            stack.enter_context(self.stop.heeded())
            run = RanksRun(
                prepared, self._folder, log.record, self.stop, self._tell,
                timeout_s=self._timeout_s,
            )  # fmt: skip
            self._run = run
            if done < prepared.num_steps:
                run.train()
            result = self._result(prepared, run, seen.tokens_per_s)
            if run.timeline is not None:
                self._compare(prepared.plan, run.timeline)
            if run.rests.failure is not None:
                raise self._folder.ended(run.rests.failure, result)
            return result

    def _result(
        self, prepared: RanksPrepared, run: RanksRun, measured: float | None
    ) -> RanksResult:
        reached = self._folder.reached(run.rests.checkpoint, prepared.num_steps)
        return RanksResult(
            folder=self._folder.files.folder, model=reached.model, step=reached.step,
            loss=run.loss, eval_loss=run.rests.eval_loss, signal=self.stop.signal,
            fill=run.fill, waited_s=run.waited_s, skipped=run.skipped,
            predicted_tokens_per_s=prepared.plan.tokens_per_s, measured_tokens_per_s=measured,
        )  # fmt: skip

    def _write_plan(self, plan: RanksPlan) -> None:
        self._folder.files.forget_one_device()
        write_document(plan.schedule, self._folder.files.cluster)
        save_with_node(plan.place.cluster, plan.place.machine, self._folder.files.profile)
        write_document(plan.choice, self._folder.files.layouts)

    def _compare(self, plan: RanksPlan, measured: ClusterTimeline) -> None:
        """Write when all ranks did what, and the comparison, op by op."""
        write_document(measured, self._folder.files.measured)
        comparison = compare(plan.schedule, plan.predicted, measured)
        write_document(comparison, self._folder.files.comparison)


class _Speed(Callback):
    """Keeps how fast steps are."""

    def __init__(self) -> None:
        self._found: list[float] = []

    def on_step(self, metrics: StepMetrics) -> None:
        self._found.append(metrics.tokens_per_s)

    @property
    def tokens_per_s(self) -> float | None:
        return median(self._found[1:]) if self._found[1:] else None
