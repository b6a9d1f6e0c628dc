"""Score data: the log-probability of every token that a model is to predict, by forward passes.

The plan is one of a forward alone: weights are only read, and stream through the device's memory
where they do not fit. Documents are packed as in training, in the order of the files; so what is
written has the bits of a training's forward pass over the same chunks.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from math import fsum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from twinstream.api import require_torch
from twinstream.data.encoding.block_tokeniser import row_places
from twinstream.data.packing import Chunk, ChunkShape, chunk_of, empty_chunk, pack
from twinstream.data.spans import NO_LABEL, Spans, cut, joined, sizes_for
from twinstream.data.training_data import TrainingData
from twinstream.executor.program.module_programs import ModulePrograms
from twinstream.executor.program.options import BackendName, RunOptions
from twinstream.models.providers.trained import all_groups
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.workload import Result
from twinstream.training.machine import LocalMachine, Tell, detect_machine
from twinstream.training.model_opening import OpenedModel, open_model, within_positions
from twinstream.training.options import TrainOptions
from twinstream.training.planning import DevicePlan, Documents, plan_of, recipe_of
from twinstream.training.preparing import texts_of
from twinstream.training.run.disk_files import disk_files
from twinstream.training.run.starting_state import starting_buffers, starting_state

if TYPE_CHECKING:
    from twinstream.executor.run.evaluation import EvaluationBatch

Floats = NDArray[np.float32]
SCORED = (
    *("tokenizer", "seq_len", "columns", "loss_on", "long_documents", "skip_bad_rows"),
    *("chat_template", "data_workers", "adapter", "dtype", "kernels", "attention"),
    *("nondeterministic", "tokens_per_step", "chunk_tokens", "device_mem", "host_mem", "policy"),
    *("disk", "disk_mem", "disk_bandwidth"),
    *("machine", "backend", "seed", "trust_remote_code"),
)
"""The options of a run that scoring has a use for."""
_PASSES_AT_A_TIME = 16


@dataclass(frozen=True)
class Score:
    """A document's score.

    Attributes:
        file, row: where it stands; rows count from 1, of the file. A text file is cut into
            documents, which have its name and no row.
        tokens: of the document, as far as it was computed.
        targets: tokens that are to be predicted, each with a log-probability.
        log_prob: their sum, in nats.
        log_probs: theirs, float32 [targets].
        parts: pieces that a document longer than `seq_len` was cut into, none of which sees what
            stands before it; 1 of a whole document.
    """

    file: str
    row: int | None
    tokens: int
    targets: int
    log_prob: float
    log_probs: Floats
    parts: int

    def as_json(self, *, with_tokens: bool) -> str:
        """Return one line of JSON, with the log-probability of each token if wanted."""
        fields: dict[str, Any] = {
            "file": self.file, "row": self.row, "tokens": self.tokens, "targets": self.targets,
            "log_prob": self.log_prob,
        }  # fmt: skip
        if self.parts > 1:
            fields["parts"] = self.parts
        if with_tokens:
            fields["log_probs"] = self.log_probs.tolist()
        return json.dumps(fields, ensure_ascii=False)


@dataclass(frozen=True)
class Scorer:
    """A model, data and a plan of forward passes, before anything has run.

    `windows` yields the data, some at a time, to be packed together.
    """

    options: TrainOptions
    model: OpenedModel
    data: Documents
    windows: "_Windows"
    here: LocalMachine
    plan: DevicePlan
    tell: Tell

    def results(self) -> Iterator[tuple["Window", Iterator[Floats]]]:
        """Yield documents, some at a time, with what is computed of their chunks, chunk by chunk:
        of each of T tokens what the plan's `result` is.

        Raises:
            TwinstreamError: a file has changed, or what a run can meet: no memory, a device that
                has failed.
        """
        from twinstream.executor.memory.arena_memory import arena_memory
        from twinstream.executor.memory.arenas import Arenas
        from twinstream.executor.memory.staging import Staging
        from twinstream.executor.run.execute import prepare_device, prove
        from twinstream.executor.state.training_state import put_carried

        plan, recipe = self.plan, self.plan.recipe
        schedule = plan.schedule.only
        backend: BackendName = "cuda" if self.here.backend == "cuda" else "cpu"
        modules = ModulePrograms(starting_buffers(self.model, None))
        files = disk_files(
            plan.parts, plan.states, self.model, self.options, self.here.machine, self.tell
        )
        disk = files.each[0] if files.each else None
        options = RunOptions(backend, modules=modules, tell=self.tell, disk=disk)
        prove(schedule, backend)
        prepare_device(schedule, backend)
        weights, _ = starting_state(self.model, self.options, recipe, None, self.tell, files.groups)
        with arena_memory(schedule, options) as memory:
            arenas, staging = Arenas(schedule, memory), Staging()
            for group, flat in weights:
                put_carried(schedule, arenas, f"param.{group}", flat, staging)
            for window in self.windows(plan):
                yield window, self._computed(window.chunks, memory, options)

    def _computed(
        self, chunks: Sequence[Chunk], memory: Mapping[Any, Any], options: RunOptions
    ) -> Iterator[Floats]:
        """Of each chunk the log-probability of each of its tokens' labels, [T]."""
        from twinstream.executor.run.evaluation import pass_losses

        plan = self.plan
        each = plan.workload.chunks_per_round // plan.pieces
        empty = empty_chunk(plan.shape(self.data))
        passes = [(*one, *[empty] * (each - len(one))) for one in _batched(chunks, each)]
        batches = [self._batch(one) for one in passes]
        for done in pass_losses(plan.schedule.only, memory, batches, options):
            for at in range(each):
                pieces = done.log_probs[at * plan.pieces : (at + 1) * plan.pieces]
                yield np.concatenate(pieces)

    def _batch(self, chunks: Sequence[Chunk]) -> "EvaluationBatch":
        import torch

        from twinstream.executor.run.evaluation import EvaluationBatch
        from twinstream.training.run.steps import piece_of

        pieces = self.plan.pieces
        tokens = [
            torch.from_numpy(piece_of(chunk, at, pieces))
            for chunk in chunks
            for at in range(pieces)
        ]
        packed = self.plan.workload.packing is not None
        lengths = [chunk.lengths for chunk in chunks] if packed else None
        return EvaluationBatch(tokens, 1, lengths)  # so that a loss is its log-probability


class Window:
    """Documents that are packed together, and whose scores are given in the files' order."""

    def __init__(self, shape: ChunkShape) -> None:
        self._shape, self.num_tokens = shape, 0
        self._spans: list[Spans] = []
        self._documents: list[tuple[int, int]] = []  # of each span: of which block, which of it
        self._places: list[tuple[str, int | None]] = []

    def add(
        self, spans: Spans, documents: NDArray[np.int64], places: Sequence[tuple[str, int | None]]
    ) -> None:
        """Add the spans of a block."""
        block = len(self._spans)
        self._spans.append(spans)
        self._documents += [(block, int(document)) for document in documents]
        self._places += places
        self.num_tokens += int(spans.lengths.sum())

    @cached_property
    def chunks(self) -> list[Chunk]:
        """The chunks that all spans are packed into."""
        return [chunk_of(self._joined, members, self._shape) for members in self._members]

    def rows(self, results: Iterable[Floats]) -> list[Floats]:
        """Return of each span what its tokens have, [length, ...].

        Args:
            results: of each chunk, [T, ...], in their order.
        """
        lengths = self._joined.lengths
        found: list[Floats] = [np.empty(0, np.float32)] * len(lengths)
        for members, result in zip(self._members, results, strict=False):
            at = 0
            for span in members.tolist():
                length = int(lengths[span])
                found[span] = result[at : at + length].copy()
                at += self._shape.longest if self._shape.alone else length
        return found

    def scores(self, results: Iterable[Floats]) -> Iterator[Score]:
        """Yield each document with the log-probabilities of what is to be predicted of it.

        Args:
            results: of each chunk the log-probability of each label, [T], in their order.
        """
        spans, found = self._joined, self.rows(results)
        for span, (start, length) in enumerate(zip(spans.starts, spans.lengths, strict=True)):
            learned = spans.labels[start : start + length - 1] >= 0
            found[span] = found[span][:-1][learned]
        by_document: dict[tuple[int, int], list[int]] = {}
        for span in np.lexsort((spans.starts,)).tolist():
            by_document.setdefault(self._documents[span], []).append(span)
        for spans_of_it in by_document.values():
            log_probs = np.concatenate([found[span] for span in spans_of_it])
            file, row = self._places[spans_of_it[0]]
            yield Score(
                file, row, int(spans.lengths[spans_of_it].sum()), len(log_probs),
                fsum(log_probs.tolist()), log_probs, len(spans_of_it),
            )  # fmt: skip

    @cached_property
    def _joined(self) -> Spans:
        return joined(self._spans)

    @cached_property
    def _members(self) -> list[NDArray[np.int64]]:
        return pack(self._joined.totals, self._shape)


def _windows(data: TrainingData, plan: DevicePlan) -> Iterator[Window]:
    """Yield documents of files, in their order; raises DataError of a file or a row."""
    shape = plan.shape(data)
    each = plan.workload.chunks_per_round // plan.pieces
    wanted = each * shape.chunk_tokens * _PASSES_AT_A_TIME
    with closing(data.feed()) as feed:
        window = Window(shape)
        for source in data.blocks:
            for block in source:
                feed.prefetch([block])
                tokens = feed.take(block)
                sizes = sizes_for(
                    shape.longest, shape.chunk_tokens, is_continuous=block.is_continuous
                )
                spans = cut(tokens, sizes)
                documents = np.searchsorted(tokens.ends, spans.starts, side="right")
                rows = row_places(block)
                window.add(spans, documents, [rows[row] for row in tokens.rows[documents]])
                if window.num_tokens >= wanted:
                    yield window
                    window = Window(shape)
        if window.num_tokens:
            yield window


_Windows = Callable[[DevicePlan], Iterator[Window]]


@dataclass(frozen=True)
class TokenSequences:
    """Sequences of tokens that are given as they are.

    Attributes:
        ids: int32 [N], one sequence after the other.
        ends: [D], where each ends.
    """

    ids: NDArray[np.int32]
    ends: NDArray[np.int64]
    sides = 1

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]]) -> "TokenSequences":
        """Return sequences as they are given.

        Raises:
            TwinstreamError: there is none, or one is shorter than 2 tokens.
        """
        lengths = [len(one) for one in sequences]
        if not lengths or min(lengths) < 2:
            raise TwinstreamError(
                f"{len(lengths)} sequences, the shortest of {min(lengths, default=0)} tokens: give "
                "one at least, each of 2 tokens or more"
            )
        ids = np.concatenate([np.asarray(one, np.int32) for one in sequences])
        return cls(ids, np.cumsum(lengths))

    @property
    def longest(self) -> int:
        return int(self.lengths().max())

    @property
    def epoch_tokens(self) -> int:
        return len(self.ids)

    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.ends, prepend=0)

    def windows(self, plan: DevicePlan) -> Iterator[Window]:
        lengths = self.lengths()
        labels = np.append(self.ids[1:], NO_LABEL).astype(np.int32)
        spans = Spans(self.ids, labels, self.ends - lengths, lengths)
        window = Window(plan.shape(self))
        window.add(spans, np.arange(len(lengths)), [("", None)] * len(lengths))
        yield window


def scorer_of(
    options: TrainOptions, result: Result, given: TokenSequences | None = None,
    tell: Tell = lambda line: None,
) -> Scorer:  # fmt: skip
    """Open model and data, and plan forward passes.

    Args:
        given: in place of the options' files.

    Raises:
        TwinstreamError: something cannot be used, or nothing fits.
    """
    require_torch()
    from twinstream.executor.run.execute import choose_backend

    model = open_model(options, weights=True)
    options = within_positions(options, model.spec, tell)
    backend = choose_backend(options.backend)
    data, windows = (given, given.windows) if given else _of_files(options, model)
    here = detect_machine(options, None, backend, model.spec.dtype, tell, model.spec.head_dim)
    here.require_own_profile()
    recipe = only_read(recipe_of(options, here, model.spec), model)
    plan = plan_of(options, here, model.spec, recipe, data, result)
    return Scorer(options, model, data, windows, here, plan, tell)


def _of_files(options: TrainOptions, model: OpenedModel) -> tuple[Documents, _Windows]:
    data = texts_of(options, model, None)(options.data, options.data_workers)
    return data, partial(_windows, data)


def only_read(recipe: Recipe, model: OpenedModel) -> Recipe:
    """Return the recipe with all groups frozen, adapters too."""
    groups = all_groups(model.spec, recipe)
    return recipe.model_copy(update={"frozen": tuple(sorted(groups)), "clips": False})


def score(
    model: str | Path, data: str | Path | Sequence[str | Path], **options: Any
) -> list[Score]:
    """Score documents: `twinstream score MODEL DATA...`.

    Args:
        model: a Hugging Face folder, a config.json (random weights) or a preset.
        data: files and folders, as `train` takes them.
        options: those of `TrainOptions` that scoring has a use for (`SCORED`).

    Returns:
        Each document's log-probabilities, in the order of the files.

    Raises:
        TwinstreamError: an option, a file or the plan.
    """
    return list(scored(scorer_of(score_options(model, data, options), "log_probs")))


def scored(scorer: Scorer) -> Iterator[Score]:
    """Score each document of a scorer's files, in their order.

    Raises:
        TwinstreamError: as `Scorer.results`.
    """
    for window, results in scorer.results():
        yield from window.scores(results)


def logits(model: str | Path, sequences: Sequence[Sequence[int]], **options: Any) -> list[Floats]:
    """Compute the logits of sequences of tokens, within whatever memory there is.

    Args:
        model: a Hugging Face folder, a config.json (random weights) or a preset.
        sequences: ids of tokens.
        options: as `score` takes them.

    Returns:
        Of each sequence float32 [tokens, vocabulary].

    Raises:
        TwinstreamError: an option or the plan, or an id is none of the model's.
    """
    given = TokenSequences.of(sequences)
    wanted = score_options(model, (), options | {"seq_len": given.longest})
    scorer = scorer_of(wanted, "logits", given)
    vocab_size = scorer.model.spec.vocab_size
    if not 0 <= given.ids.min() <= given.ids.max() < vocab_size:
        raise TwinstreamError(
            f"token ids are from {given.ids.min()} to {given.ids.max()}, and the model has those "
            f"from 0 to {vocab_size - 1}"
        )
    [found] = [
        window.rows(one.reshape(-1, vocab_size) for one in results)
        for window, results in scorer.results()
    ]
    return found


def score_options(
    model: str | Path, data: str | Path | Sequence[str | Path], given: Mapping[str, Any]
) -> TrainOptions:
    """
    Raises:
        OptionsError: one is unknown, wrong, or none of scoring.
    """
    if unknown := sorted(given.keys() - set(SCORED)):
        raise TwinstreamError(
            f"there is no option '{unknown[0]}' of scoring; there are: {', '.join(SCORED)}"
        )
    several = [data] if isinstance(data, str | Path) else list(data)
    fields = {"model": str(model), "data": [str(one) for one in several], "output": Path()}
    return TrainOptions.of(fields | dict(given))


def _batched(chunks: Sequence[Chunk], each: int) -> Iterator[Sequence[Chunk]]:
    return (chunks[at : at + each] for at in range(0, len(chunks), each))
