"""The training loop: steps, checkpoints and evaluations of a run, on one device or several ranks.

Ranks compute. This process feeds them, logs, and writes files. One device is a rank in a thread of
this process, several are processes of their own; the loop is the same.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from twinstream.data.chunk_stream import ChunkStream
from twinstream.data.data_error import DataError
from twinstream.data.order import Position
from twinstream.data.packing import Chunk
from twinstream.executor.launch.protocol import Batch, StepResult, TrainTask
from twinstream.executor.program.options import BackendName
from twinstream.log.metrics import AnyEvent, StepMetrics
from twinstream.measures.residence import written_names
from twinstream.models.providers.trained import trained_groups
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.timeline import Timeline
from twinstream.training.machine import Tell
from twinstream.training.preparing import Prepared
from twinstream.training.run.disk_files import disk_files
from twinstream.training.run.evaluating import Evaluator, passes_over
from twinstream.training.run.hooks import RunProgress, StepHooks
from twinstream.training.run.reference import Reference, ReferencePasses, reference_of
from twinstream.training.run.run_folder import TrainingFolder
from twinstream.training.run.starting_state import starting_buffers, starting_state
from twinstream.training.run.steps import (
    ReferenceOf,
    StepBatches,
    StepData,
    StepRecorder,
    batch_of,
)
from twinstream.training.run.stopping import Stop
from twinstream.training.server import TrainerServer

if TYPE_CHECKING:
    from twinstream.executor.providers.provider import Weights
    from twinstream.executor.state.sources import Optimizer
    from twinstream.executor.weights.disk_reader import DiskFiles

_LEAST_TIMEOUT_S, _TIMEOUT_STEPS = 60.0, 20.0


class TrainingLoop:
    """Trains all steps that are left, from the last checkpoint or the beginning.

    Args:
        timeout_s: how long a rank may keep others waiting; by default 20 steps, a minute at least.

    Attributes:
        hooks: what is done between steps.
        step: the last that was done in order; the one before the first at the beginning.
        loss: of the last step that was logged; None before the first.
        tokens_per_s: of each step that was logged.
        stream: of the data; None before training.
        pids: of the ranks' processes, while they run.
    """

    def __init__(
        self,
        prepared: Prepared,
        folder: TrainingFolder,
        record: Callable[[AnyEvent], None],
        stop: Stop,
        tell: Tell,
        *,
        timeout_s: float | None = None,
    ) -> None:
        self._prepared, self._record, self._stop, self._tell = prepared, record, stop, tell
        self._timeout_s = timeout_s
        self.hooks = StepHooks(prepared, folder, record, tell)
        self.step, self._first = folder.steps_done, folder.steps_done + 1
        self.loss: float | None = None
        self.tokens_per_s: list[float] = []
        self.stream: ChunkStream | None = None
        self.pids: list[int] = []

    @property
    def stopped(self) -> bool:
        """Whether it ends before the last step: that was asked for, or it cannot go on."""
        ends = self._stop.asked or self.hooks.failure is not None
        return ends and self.step < self._prepared.num_steps

    def train(self) -> Timeline:
        """All steps that are left, until stopped.

        Returns:
            When every op ran, of the steps that were timed.

        Raises:
            TwinstreamError: what a run can meet: a rank that ended it, a loss that is no number, a
                device that has failed or has no memory left (and what to go on from).
        """
        from twinstream.executor.memory.device_memory import DeviceFailedError, DeviceMemoryError

        try:
            return self._train()
        except (DeviceFailedError, DeviceMemoryError) as error:
            if (last := self.hooks.checkpoint) is None:
                raise
            way_on = f"The last checkpoint is {last.path}: go on from it with --resume."
            raise type(error)(f"{error} {way_on}") from error
        finally:
            self.pids = []

    def close(self) -> None:
        """End the processes that read data."""
        if self.stream is not None:
            self.stream.close()

    def _train(self) -> Timeline:
        prepared, plan, hooks = self._prepared, self._prepared.plan, self.hooks
        files = disk_files(
            plan.parts, plan.states, prepared.model, prepared.options, prepared.here.machine,
            self._tell,
        )  # fmt: skip
        state = starting_state(
            prepared.model, prepared.options, plan.recipe, hooks.checkpoint, self._tell,
            files.groups,
        )  # fmt: skip
        batches = self._batches()
        evaluated: list[StepData] = []
        if prepared.eval_data is not None:
            evaluated = passes_over(prepared.eval_data, plan, prepared.options.eval_tokens)
        reference = reference_of(prepared) if plan.recipe.loss.has_reference else None
        compared = None if reference is None else reference.of
        recorder = self._recorder_of(batches, compared)
        progress = RunProgress(plan.recipe, plan.workload, batches, recorder)

        def feed(replica: int, step: int) -> Batch:
            data = batches.step(step)
            return batch_of(data, replica, plan.chunks_of_a_replica, plan, compared)

        def log(replica: int, result: StepResult) -> None:
            recorder.take(result.sink, result.step, result.value, replica)

        timeout_s = self._timeout_s or max(_LEAST_TIMEOUT_S, _TIMEOUT_STEPS * plan.step_s)
        evaluates_at_all = bool(evaluated) or reference is not None
        task = self._task(plan.evaluation() if evaluates_at_all else None, files.each)
        backend: BackendName = "cuda" if prepared.here.backend == "cuda" else "cpu"
        with closing(plan.started(task, backend, self._tell, timeout_s)) as ranks:
            self.pids = ranks.pids
            server = TrainerServer(ranks, plan, feed, log, timeout_s)
            server.pause(self._first - 1)  # until all are warm
            if reference is not None:
                self._compute(reference, evaluated, server, files.groups)
            self._write_state(server, *state)
            evaluator = None
            if evaluated:
                known = self._prepared.is_cross_entropy
                evaluator = Evaluator(plan, evaluated, compared, is_cross_entropy=known)
            hooks.begin()
            recorder.skip_time()
            server.resume()
            ends = False
            while not ends:
                # Step: ranks begin it, a step or two ahead of the last that is complete. Meanwhile
                # the server feeds them, and logs the results of each step as they come.
                step = server.next_step()

                # Stop: after the last step, when told to, and where the next step has no data.
                if step < prepared.num_steps:
                    hooks.failure = batches.failure(step + 1, compared)
                ends = step == prepared.num_steps or self._stop.asked or hooks.failure is not None

                saves, evaluates = hooks.due(step, is_last=ends)
                server.decide(step, pauses=saves or evaluates)
                if not (saves or evaluates):
                    continue
                server.pause(step)
                self.step = step

                # Checkpoint: first, so that no evaluation that fails costs one.
                if saves:
                    write_tensors = partial(self._write_tensors, server)
                    hooks.write_checkpoint(step, progress, write_tensors, is_last=ends)

                # Evaluate.
                if evaluates and evaluator is not None:
                    hooks.evaluate(step, partial(evaluator.evaluate, server))
                if saves:
                    hooks.prune()

                recorder.skip_time()
                server.resume(goes_on=not ends)
            return plan.measured(server.outcomes(), 1 + prepared.num_steps - self._first)

    def _compute(
        self, reference: Reference, evaluated: Sequence[StepData], server: TrainerServer,
        on_disk: Collection[str],
    ) -> None:  # fmt: skip
        """Completes the reference, with the weights that the run began with.

        Args:
            on_disk: groups that are there already.

        Raises:
            TwinstreamError: it is stopped, or the model has changed.
        """
        prepared, plan, checkpoint = self._prepared, self._prepared.plan, self.hooks.checkpoint
        chunks_told = f"{plan.shape(prepared.data)}, {plan.chunks_per_step} of {prepared.num_steps}"
        covers = f"{prepared.data.fingerprint} {prepared.options.seed} {chunks_told}"
        if prepared.eval_data is not None:
            covers += f" {prepared.eval_data.fingerprint} {prepared.options.eval_tokens}"
        if reference.covers == covers:
            return
        if reference.is_of_another and checkpoint is not None:
            raise TwinstreamError(
                f"{prepared.options.model} is not what it was when the run began, and the loss "
                "compares with that: put it back, or start a new run"
            )
        start = Position() if checkpoint is None else checkpoint.state.position.position()
        count = (1 + prepared.num_steps - self._first) * plan.chunks_per_step
        whole_epochs = all(weight == int(weight) for weight in prepared.data.weights)

        is_mid_epoch = start.group + start.chunk > 0
        bad_data: list[DataError] = []  # which the run ends with a checkpoint at

        def chunks() -> Iterator[Chunk]:
            yield from (chunk for one in evaluated for chunk in one.chunks)
            with plan.chunks(prepared.data, prepared.options.seed, start) as stream:
                for chunk in islice(_until_bad_data(stream, bad_data), count):
                    if self._stop.asked:
                        raise TwinstreamError(
                            f"stopped before step {self._first}: {len(reference):,} pairs of the "
                            "reference are kept; go on with --resume"
                        )
                    yield chunk
                    if whole_epochs and stream.position.epoch > start.epoch + is_mid_epoch:
                        return

        if not all(map(reference.has, chunks())):
            self._tell("computing the reference: log-probabilities of pairs before training")
            options = prepared.options.model_copy(update={"adapter": None})
            before = starting_state(prepared.model, options, plan.recipe, None, self._tell, on_disk)
            self._write_state(server, *before)
            ReferencePasses(reference, plan, prepared.data).compute(chunks(), server)
            self._tell(f"the reference knows {len(reference):,} pairs")
        reference.covers = "" if bad_data else covers
        reference.keep()

    def _batches(self) -> StepBatches:
        prepared, checkpoint, plan = self._prepared, self.hooks.checkpoint, self._prepared.plan
        start = Position() if checkpoint is None else checkpoint.state.position.position()
        self.stream = plan.chunks(prepared.data, prepared.options.seed, start)
        return StepBatches(self.stream, plan.chunks_per_step, self._first, plan.pieces)

    def _recorder_of(self, batches: StepBatches, reference: ReferenceOf | None) -> StepRecorder:
        prepared, checkpoint = self._prepared, self.hooks.checkpoint

        def on_step(metrics: StepMetrics) -> None:
            self.loss = metrics.loss
            self.tokens_per_s.append(metrics.tokens_per_s)
            self._record(metrics)

        return StepRecorder(
            batches,
            prepared.rate,
            plan=prepared.plan,
            reference=reference,
            tokens=0 if checkpoint is None else checkpoint.state.tokens,
            epoch_tokens=prepared.data.epoch_tokens,
            on_step=on_step,
        )

    def _task(self, evaluation: Schedule | None, disk: "tuple[DiskFiles, ...]") -> TrainTask:
        prepared = self._prepared
        return TrainTask(
            first=self._first,
            last=prepared.num_steps,
            rate=prepared.rate,
            seed=prepared.options.seed,
            max_norm=prepared.options.max_grad_norm if prepared.plan.recipe.clips else 0.0,
            evaluation=evaluation,
            buffers=starting_buffers(prepared.model, self.hooks.checkpoint),
            disk=disk,
        )

    def _write_state(
        self, server: TrainerServer, weights: "Weights", optimizer: "Optimizer"
    ) -> None:
        """Read or draw the state a group at a time."""
        trained = set(trained_groups(self._prepared.model.spec, self._prepared.plan.recipe))
        for group, flat in weights:
            server.write(f"param.{group}", flat)
            if group in trained:
                server.write(f"opt.{group}", optimizer(group, flat))

    def _write_tensors(self, server: TrainerServer, folder: Path) -> None:
        from twinstream.executor.weights.checkpoint_files import write_tensors

        names = written_names(server.names)
        needed_bytes, outline = self._prepared.plan.checkpoint_bytes, self._prepared.outline
        write_tensors(folder, outline.write, names, server.read, server.pieces, needed_bytes)


def _until_bad_data(stream: ChunkStream, bad_data: list[DataError]) -> Iterator[Chunk]:
    """The chunks up to one that cannot be made; why is noted."""
    try:
        yield from stream
    except DataError as error:
        bad_data.append(error)
