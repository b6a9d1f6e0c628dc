"""All steps of a run on several ranks: their data, losses, rests and checkpoints."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from twinstream.clusters.running.measured import measured_cluster_timeline
from twinstream.data.order import Position
from twinstream.log.metrics import AnyEvent, StepMetrics
from twinstream.models.trained import trained_groups
from twinstream.schedule.cluster.cluster_timeline import ClusterTimeline
from twinstream.schedule.cluster.projecting import rank_part
from twinstream.schedule.cluster.verify_cluster import require_safe_cluster
from twinstream.training.checkpoints import Checkpoint, written_names
from twinstream.training.preparing import Tell
from twinstream.training.ranks.evaluating import RanksEvaluator
from twinstream.training.ranks.lines import START_S, RankLines, Resting, SilentRankError, rank_lines
from twinstream.training.ranks.messages import DataOf, RankTask, Result, StepShare
from twinstream.training.ranks.preparing import RanksPrepared
from twinstream.training.ranks.rank_side import rank_inputs
from twinstream.training.ranks.state_of_ranks import StateOfRanks
from twinstream.training.run.batches import StepBatches
from twinstream.training.run.recorder import StepRecorder
from twinstream.training.run.rests import AtRest, Rests, Underway
from twinstream.training.run.run_folder import RunFolder
from twinstream.training.run.segments import starting_state
from twinstream.training.run.stopping import Stop

_KEPT_STEPS = 16  # stages are a few steps apart, at most
_LEAST_TIMEOUT_S, _TIMEOUT_STEPS = 60.0, 20.0


class RanksRun:
    """Trains from a checkpoint, or from the beginning, until stopped.

    Args:
        timeout_s: how long a rank may keep others waiting; by default 20 steps, a minute at least.

    Attributes:
        rests: what is done between steps.
        loss: of the last step; None before the first.
        pids: of the ranks' processes, while they run.
        timeline: when all ranks did what, of the steps that were timed; None before the end.
    """

    def __init__(
        self,
        prepared: RanksPrepared,
        folder: RunFolder,
        record: Callable[[AnyEvent], None],
        stop: Stop,
        tell: Tell,
        *,
        timeout_s: float | None = None,
    ) -> None:
        self._timeout_s = timeout_s or max(_LEAST_TIMEOUT_S, _TIMEOUT_STEPS * prepared.plan.step_s)
        self._prepared, self._record, self._stop = prepared, record, stop
        self.rests = Rests(prepared, folder, record, tell, fatal=(SilentRankError,))
        self.loss: float | None = None
        self.fill, self.waited_s = 1.0, 0.0
        self.skipped: tuple[str, ...] = ()
        self.pids: list[int] = []
        self.timeline: ClusterTimeline | None = None
        self._lock = threading.Lock()
        self._due: dict[int, bool] = {}
        self._results: dict[tuple[str, int], dict[int, float]] = {}
        schedule = prepared.plan.schedule
        self._parts = [rank_part(schedule, rank) for rank in range(schedule.mesh.size)]
        self._state_of_ranks = StateOfRanks(
            self._parts, prepared.model.spec, prepared.recipe, prepared.plan.layout
        )
        self._evaluator: RanksEvaluator | None = None
        if (data := prepared.eval_data) is not None:
            most = prepared.options.eval_tokens
            self._evaluator = RanksEvaluator(prepared.plan, self._parts, data, most)

    def train(self) -> None:
        """All steps that are left, until stopped.

        Raises:
            RanksError: a rank ended the run; says which, and why.
            TwinstreamError: a loss that is no number; a disk that is full.
        """
        from twinstream.executor.launch.rank_processes import RankProcesses
        from twinstream.executor.program.options import RunOptions
        from twinstream.executor.ranks.errors import RanksError
        from twinstream.executor.ranks.world import Patience
        from twinstream.executor.run.execute import choose_backend

        require_safe_cluster(self._prepared.plan.schedule)
        prepared, plan, checkpoint = self._prepared, self._prepared.plan, self.rests.checkpoint
        start, first, last = Position(), 1, prepared.num_steps
        if checkpoint is not None:
            start, first = checkpoint.state.position.position(), checkpoint.state.step + 1
        self._first = first
        # the last pass is never begun, so that the last two steps are timed
        options = RunOptions(
            choose_backend(prepared.here.backend), 2 + last - first, timed_passes=3
        )
        num_ranks, patience = len(self._parts), Patience(self._timeout_s, START_S)
        with (
            plan.chunks(prepared.data, prepared.options.seed, start) as stream,
            RankProcesses(num_ranks, patience, start_method="forkserver") as processes,
            rank_lines(num_ranks, self, processes.kill, self._timeout_s) as lines,
        ):
            self.pids = processes.pids
            self._batches = StepBatches(
                stream, plan.chunks_per_step, first, plan.pieces, kept=_KEPT_STEPS
            )
            self._recorder = self._recorder_of(checkpoint)
            self.rests.begin()
            try:
                inputs = partial(rank_inputs, self._task(lines))
                outcomes = processes.execute(plan.schedule, inputs, options)
                steps = 1 + last - first
                self.timeline = measured_cluster_timeline(plan.schedule, outcomes, steps)
            except RanksError:
                if lines.error is not None:
                    raise lines.error from None
                raise
            finally:
                processes.close()
                self.pids = []
            self.fill, self.waited_s = stream.fill, stream.waited_s
            self.skipped = tuple(stream.skipped)

    def _task(self, lines: RankLines) -> RankTask:
        prepared, plan = self._prepared, self._prepared.plan
        return RankTask(
            address=lines.address,
            key=lines.key,
            first=self._first,
            last=prepared.num_steps,
            chunks=plan.chunks_of_a_replica,
            pieces=plan.pieces,
            rate=prepared.rate,
            seed=prepared.options.seed,
            packed=plan.workload.packing is not None,
            max_norm=prepared.options.max_grad_norm if prepared.recipe.clips else 0.0,
            evaluation=None if self._evaluator is None else self._evaluator.schedule,
        )

    def _recorder_of(self, checkpoint: Checkpoint | None) -> StepRecorder:
        prepared = self._prepared

        def on_step(metrics: StepMetrics) -> None:
            self.loss = metrics.loss
            self._record(metrics)

        return StepRecorder(
            self._batches,
            prepared.rate,
            predicted_s=prepared.plan.step_s,
            clips=prepared.recipe.clips,
            tokens=0 if checkpoint is None else checkpoint.state.tokens,
            epoch_tokens=prepared.data.epoch_tokens,
            on_step=on_step,
        )

    def data(self, question: DataOf) -> StepShare:
        """Of a replica."""
        plan, data = self._prepared.plan, self._batches.step(question.step)
        begin = question.begin // plan.pieces
        count = plan.chunks_of_a_replica // plan.pieces
        return StepShare(data.chunks[begin : begin + count], data.targets)

    def result(self, told: Result, rank: int) -> None:
        """A loss is the sum of its shares, in the order of replicas; a norm is the same for all.

        Raises:
            LossError: it is no number.
        """
        with self._lock:
            found = self._results.setdefault((told.sink, told.step), {})
            found[self._parts[rank].coordinates.get("dp", 0)] = told.value
            if len(found) < self._prepared.plan.layout.dp:
                return
            del self._results[told.sink, told.step]
            values = [found[replica] for replica in sorted(found)]
            value = sum(values) if told.sink == "loss" else values[0]
            self._recorder.take(told.sink, told.step, value)

    def is_due(self, step: int) -> bool:
        """What the first rank that asks is told, the others are told, too."""
        with self._lock:
            if step not in self._due:
                if step < self._prepared.num_steps:
                    self.rests.failure = self._batches.failure(step + 1)
                self._due[step] = self._ends(step) or self.rests.is_due(step)
                self._due.pop(step - _KEPT_STEPS, None)
            return self._due[step]

    def at_rest(self, step: int, ranks: Resting) -> bool:
        """Give the ranks their state before the first step; save it after others."""
        if step < self._first:
            self._fill(ranks)
            self._recorder.skip_time()
            return True
        is_last, evaluator = self._ends(step), self._evaluator
        evaluate = None if evaluator is None else partial(evaluator.evaluate, ranks, step)
        prepared, write = self._prepared, partial(self._write_tensors, ranks=ranks)
        run = Underway(prepared.recipe, prepared.plan.workload, self._batches, self._recorder)
        self.rests.rest(AtRest(step, is_last, evaluate, write), run)
        return not is_last

    def _ends(self, step: int) -> bool:
        """Whether a step is the last: of all, or because that was asked for or data failed."""
        stops = self._stop.asked or self.rests.failure is not None
        return stops or step == self._prepared.num_steps

    def _fill(self, ranks: Resting) -> None:
        """Read or draw the state a group at a time."""
        prepared = self._prepared
        weights, optimizer = starting_state(
            prepared.model, prepared.options, prepared.recipe, self.rests.checkpoint
        )
        trained = set(trained_groups(prepared.model.spec, prepared.recipe))
        for group, flat in weights:
            self._state_of_ranks.put(ranks, f"param.{group}", flat)
            if group in trained:
                self._state_of_ranks.put(ranks, f"opt.{group}", optimizer(group, flat))

    def _write_tensors(self, folder: Path, ranks: Resting) -> None:
        from twinstream.executor.weights.checkpoint_files import write_tensors

        has_adapters = self._prepared.recipe.lora is not None
        write_tensors(
            folder,
            self._prepared.outline,
            written_names(self._state_of_ranks.names, adapters=has_adapters),
            partial(self._state_of_ranks.take, ranks),
            self._prepared.plan.checkpoint_bytes,
        )
