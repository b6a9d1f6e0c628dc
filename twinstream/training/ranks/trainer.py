"""A training run on several ranks: prepared, started or gone on with, and what it comes to."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from twinstream.api import require_torch
from twinstream.hardware_profiles.clusters.loader import save_with_node
from twinstream.log.metrics import StepMetrics
from twinstream.log.run_files import RunFiles
from twinstream.log.tensorboard import require_tensorboard
from twinstream.measures.cluster_comparison import compare_cluster
from twinstream.schedule.cluster.cluster_timeline import ClusterTimeline
from twinstream.schedule.files import write_document
from twinstream.training.amounts import every
from twinstream.training.callbacks import Callback
from twinstream.training.checkpoints import (
    COMPLETE,
    STATE_FILE,
    Checkpoint,
    Checkpoints,
    linked_copy,
)
from twinstream.training.machine import keep_machine, machine_here
from twinstream.training.opening import open_model
from twinstream.training.options import (
    TrainOptions,
    read_options,
    require_same,
    require_usable,
    write_options,
)
from twinstream.training.preparing import Tell
from twinstream.training.ranks.planning import RanksPlan
from twinstream.training.ranks.preparing import RanksPrepared, prepare_ranks
from twinstream.training.ranks.ranks_run import RanksRun
from twinstream.training.ranks.refusals import require_possible
from twinstream.training.run.run_log import RunLog
from twinstream.training.run.stopping import Stop


@dataclass(frozen=True)
class RanksResult:
    """What a run on several ranks came to.

    Attributes:
        folder: of the run.
        model: its weights as a Hugging Face folder; None where the run was stopped before its end.
        step: the last that was done.
        loss: of that step; None where none was done.
        eval_loss: of the last evaluation.
        predicted_tokens_per_s, measured_tokens_per_s: of a step; measured is the median but for
            the first, and None where there was no other.
        signal: that ended it; 0 is none.
        fill: share of the tokens that were no padding.
        waited_s: how long steps waited for data, after the first.
    """

    folder: Path
    model: Path | None
    step: int
    loss: float | None
    eval_loss: float | None
    predicted_tokens_per_s: float
    measured_tokens_per_s: float | None
    signal: int
    fill: float
    waited_s: float

    @property
    def stopped(self) -> bool:
        """Whether it ended before its last step."""
        return self.model is None


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
        self._files = RunFiles(options.output)
        require_usable(self._files, resume=resume)
        if resume:
            require_same(options, TrainOptions.of(read_options(self._files.options)))
        self._checkpoints = Checkpoints(options.output)
        self._checkpoint: Checkpoint | None = self._checkpoints.latest() if resume else None
        self._prepared: RanksPrepared | None = None
        self._run: RanksRun | None = None

    @property
    def steps_done(self) -> int:
        """Before this start, by the checkpoint that is gone on from."""
        return 0 if self._checkpoint is None else self._checkpoint.state.step

    @property
    def pids(self) -> list[int]:
        """Of the ranks' processes, while they run."""
        return [] if self._run is None else self._run.pids

    def prepare(self) -> RanksPrepared:
        """Model, data, layout and plan; nothing is written, and it is done once.

        Raises:
            TwinstreamError: something cannot be used, or nothing fits.
        """
        if self._prepared is None:
            from twinstream.executor.ranks.gpus import require_gpus
            from twinstream.executor.run.execute import choose_backend

            options = self._options
            model = open_model(options)
            if (backend := choose_backend(options.backend)) == "cuda":
                require_gpus(options.ranks or 1)
            self._tell("looking at this machine")
            here = machine_here(options, options.output, backend, model.spec.dtype)
            self._prepared = prepare_ranks(options, here, model, self._checkpoint, self._tell)
        return self._prepared

    def train(self) -> RanksResult:
        """Train until the last step, or until stopped; the state is in a checkpoint then.

        Raises:
            TwinstreamError: what a run can meet; of a rank it says which.
        """
        prepared, done = self.prepare(), self.steps_done
        self._begin(prepared)
        for callback in self._callbacks:
            callback.on_start(prepared)
        seen = _Speed()
        with ExitStack() as stack:
            board = prepared.options.tensorboard
            looking = [seen, *self._callbacks]
            log = stack.enter_context(RunLog(self._files, done, looking, tensorboard=board))
            stack.enter_context(self.stop.heeded())
            run = RanksRun(
                prepared, self._checkpoints, log.record, self.stop, self._tell,
                timeout_s=self._timeout_s,
            )  # fmt: skip
            self._run = run
            run.checkpoint = self._checkpoint
            if done < prepared.num_steps:
                run.train(self._checkpoint, done + 1)
        if run.timeline is not None:
            self._compare(prepared.plan, run.timeline)
        return self._result(prepared, run, seen.tokens_per_s)

    def _result(
        self, prepared: RanksPrepared, run: RanksRun, measured: float | None
    ) -> RanksResult:
        step = 0 if run.checkpoint is None else run.checkpoint.state.step
        model = None
        if run.checkpoint is not None and step == prepared.num_steps:
            model = self._files.model
            linked_copy(run.checkpoint.path, model, leave_out=(STATE_FILE, COMPLETE))
        return RanksResult(
            prepared.options.output, model, step, run.loss, run.eval_loss,
            prepared.plan.tokens_per_s, measured, self.stop.signal, run.fill, run.waited_s,
        )  # fmt: skip

    def _begin(self, prepared: RanksPrepared) -> None:
        """The folder and what identifies its run."""
        folder = prepared.options.output
        self._files.make()
        self._checkpoints.remove_partial()
        write_options(prepared.options, folder)
        keep_machine(prepared.here, folder)
        if self.steps_done < prepared.num_steps:
            self._write_plan(prepared.plan)

    def _write_plan(self, plan: RanksPlan) -> None:
        self._files.forget_one_device()
        write_document(plan.schedule, self._files.cluster)
        save_with_node(plan.place.cluster, plan.place.machine, self._files.profile)
        write_document(plan.choice, self._files.layouts)

    def _compare(self, plan: RanksPlan, measured: ClusterTimeline) -> None:
        """Write when all ranks did what, and the comparison, op by op."""
        write_document(measured, self._files.measured)
        comparison = compare_cluster(plan.schedule, plan.predicted, measured)
        write_document(comparison, self._files.comparison)


class _Speed(Callback):
    """Keeps how fast steps are."""

    def __init__(self) -> None:
        self._found: list[float] = []

    def on_step(self, metrics: StepMetrics) -> None:
        self._found.append(metrics.tokens_per_s)

    @property
    def tokens_per_s(self) -> float | None:
        return median(self._found[1:]) if self._found[1:] else None
