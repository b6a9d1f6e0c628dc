"""The passes of one schedule, and what is done between them: evaluations, checkpoints, the end."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from twinstream.data.chunk_stream import ChunkStream
from twinstream.data.order import Position
from twinstream.executor.program.options import BackendName, RunOptions
from twinstream.log.metrics import AnyEvent, StepMetrics
from twinstream.schedule.ops import Fetch
from twinstream.schedule.timeline import Timeline
from twinstream.training.checkpoints import Checkpoint, written_names
from twinstream.training.preparing import Prepared, Tell
from twinstream.training.run.batches import StepBatches
from twinstream.training.run.evaluating import Evaluator
from twinstream.training.run.recorder import StepRecorder
from twinstream.training.run.rests import AtRest, Rests, Underway
from twinstream.training.run.run_folder import RunFolder
from twinstream.training.run.segments import Segment, starting_state
from twinstream.training.run.stopping import Stop

if TYPE_CHECKING:
    from twinstream.executor.program.host_work import HostWork


class SegmentRun:
    """Trains segments one after another; the data goes on from one to the next.

    Attributes:
        rests: what is done between steps.
        loss: of the last step; None before the first.
    """

    def __init__(
        self,
        prepared: Prepared,
        folder: RunFolder,
        record: Callable[[AnyEvent], None],
        stop: Stop,
        tell: Tell,
    ) -> None:
        self._prepared, self._record, self._stop, self._tell = prepared, record, stop, tell
        self.rests = Rests(prepared, folder, record, tell)
        self.loss: float | None = None
        self._stream: ChunkStream | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()

    @property
    def stopped(self) -> bool:
        """Whether it ends before the last step: that was asked for, or it cannot go on."""
        ends = self._stop.asked or self.rests.failure is not None
        return ends and self._step < self._prepared.num_steps

    @property
    def fill(self) -> float:
        return 1.0 if self._stream is None else self._stream.fill

    @property
    def waited_s(self) -> float:
        return 0.0 if self._stream is None else self._stream.waited_s

    @property
    def skipped(self) -> tuple[str, ...]:
        return () if self._stream is None else tuple(self._stream.skipped)

    def train(self, segment: Segment) -> Timeline:
        """All steps of a segment, from the last checkpoint or the beginning, until stopped.

        Raises:
            TwinstreamError: a device that has failed or has no memory left: what to go on from.
        """
        from twinstream.executor.memory.device_memory import DeviceFailedError, DeviceMemoryError

        try:
            return self._train(segment)
        except (DeviceFailedError, DeviceMemoryError) as error:
            if (last := self.rests.checkpoint) is None:
                raise
            way_on = f"The last checkpoint is {last.path}: go on from it with --resume."
            raise type(error)(f"{error} {way_on}") from error

    def _train(self, segment: Segment) -> Timeline:
        from twinstream.executor.kernels.attention.canary import check_attention
        from twinstream.executor.memory.arena_memory import arena_memory
        from twinstream.executor.memory.device_memory import expand_segments
        from twinstream.executor.run.execute import choose_backend, execute_in, prove
        from twinstream.executor.state.sources import fill_from
        from twinstream.schedule.derived.flush import flush_of

        self.rests.begin()
        checkpoint = self.rests.checkpoint
        self._segment, self._step = segment, segment.first - 1
        schedule = segment.plan.schedule
        self._backend: BackendName = choose_backend(self._prepared.here.backend)
        backend = self._backend
        prove(schedule, backend)
        self._flush = flush_of(schedule)
        if self._flush is not None:
            prove(self._flush, backend)
        self._evaluator = self._evaluator_of(segment)
        if self._evaluator is not None:
            prove(self._evaluator.schedule, backend)
        if backend == "cuda":
            expand_segments()
        check_attention(schedule, backend)
        self._open_data(segment, checkpoint)
        model, wanted = self._prepared.model, self._prepared.options
        weights, optimizer = starting_state(model, wanted, segment.recipe, checkpoint)
        options = RunOptions(
            backend, 1 + segment.last - segment.first, timed_passes=1, between=self._between,
            tell=self._tell,
        )  # fmt: skip
        with arena_memory(schedule, options) as self._memory:
            self._work = self._host_work()
            timeline = execute_in(
                schedule,
                self._memory,
                lambda arenas: fill_from(schedule, arenas, weights, optimizer),
                self._work,
                options,
            )
            self._at_rest(self._recorder.last_step, is_last=True)
        return timeline

    def _evaluator_of(self, segment: Segment) -> Evaluator | None:
        data = self._prepared.eval_data
        if data is None:
            return None
        return Evaluator(segment.plan, data, self._prepared.options.eval_tokens)

    def _open_data(self, segment: Segment, checkpoint: Checkpoint | None) -> None:
        data, plan = self._prepared.data, segment.plan
        if self._stream is None:  # a segment has the chunks that come after those of the one before
            start = Position() if checkpoint is None else checkpoint.state.position.position()
            self._stream = plan.chunks(data, self._prepared.options.seed, start)
            self._batches = StepBatches(
                self._stream, plan.chunks_per_step, segment.first, plan.pieces
            )
        self._recorder = StepRecorder(
            self._batches,
            self._prepared.rate,
            predicted_s=plan.predicted.step_ns / 1e9,
            clips=segment.recipe.clips,
            tokens=0 if checkpoint is None else checkpoint.state.tokens,
            epoch_tokens=data.epoch_tokens,
            on_step=self._on_step,
        )

    def _on_step(self, metrics: StepMetrics) -> None:
        self.loss = metrics.loss
        self._record(metrics)

    def _host_work(self) -> "HostWork":
        """Feeds the data; takes losses and norms."""
        import torch

        from twinstream.executor.run.training import Training

        schedule, first = self._segment.plan.schedule, self._segment.first
        training = Training(
            lambda step, index: torch.from_numpy(self._batches.tokens(step, index)),
            self._prepared.rate,
            self._prepared.options.seed,
            first_step=first,
            lengths=self._batches.lengths if schedule.workload.packing is not None else None,
            num_targets=self._batches.num_targets,
            max_norm=self._prepared.options.max_grad_norm if self._segment.recipe.clips else 0.0,
        )
        work = training.host_work(schedule)

        def fetch(op: Fetch, pass_index: int, taken: torch.Tensor) -> None:
            work.fetch(op, pass_index, taken)
            values = training.losses if op.sink == "loss" else training.norms
            self._recorder.take(op.sink, first + pass_index, values.pop())

        return replace(work, fetch=fetch)

    def _between(self, number: int, rest: Callable[[], None]) -> bool:
        """Before another pass; the state may be read after `rest`."""
        step = self._segment.first - 1 + number
        self.rests.failure = self._batches.failure(step + 1)
        ends = self._stop.asked or self.rests.failure is not None
        if not (ends or self.rests.is_due(step)):
            return True
        rest()
        self._at_rest(step, is_last=ends)
        return not ends

    def _at_rest(self, step: int, *, is_last: bool) -> None:
        """All passes until this step are complete, and nothing runs."""
        self._step, segment, evaluator = step, self._segment, self._evaluator
        self._make_updates(step)
        evaluate = None
        if evaluator is not None:
            evaluate = partial(evaluator.evaluate, self._memory, self._backend, step)
        run = Underway(segment.recipe, segment.plan.workload, self._batches, self._recorder)
        self.rests.rest(AtRest(step, is_last, evaluate, self._write_tensors), run)

    def _make_updates(self, step: int) -> None:
        """Those that the step has left to the next one."""
        from twinstream.executor.run.execute import flush_in

        if self._flush is not None:
            num_passes = 1 + step - self._segment.first
            options = RunOptions(self._backend)
            flush_in(self._flush, self._memory, self._work, num_passes, options)

    def _write_tensors(self, folder: Path) -> None:
        from twinstream.executor.memory.arenas import Arenas
        from twinstream.executor.state.training_state import carried_names, take_carried
        from twinstream.executor.weights.checkpoint_files import write_tensors

        schedule, has_adapters = self._segment.plan.schedule, self._segment.recipe.lora is not None
        arenas = Arenas(schedule, self._memory)
        write_tensors(
            folder,
            self._prepared.outline,
            written_names(carried_names(schedule), adapters=has_adapters),
            lambda name: take_carried(schedule, arenas, name),
            self._segment.plan.checkpoint_bytes,
        )
