"""The workload of one training step, and the model and machine that a document is about."""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from twinstream.schedule.node import Node
from twinstream.schedule.numbers import Count, PositiveCount

PADDING_LABEL = -101  # of a token that fills up a chunk; of one that has no target it is -100


class Packing(Node):
    """Sequences of any lengths in a chunk, where each begins being data of the run.

    A chunk has `most_sequences` at most. `expected_lengths` are what predictions price; neither
    safety nor results depend on them.
    """

    most_sequences: PositiveCount
    expected_lengths: Annotated[tuple[PositiveCount, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _has_room(self) -> Self:
        if len(self.expected_lengths) > self.most_sequences:
            raise PydanticCustomError(
                "too_many_lengths",
                "{given} expected_lengths are more than most_sequences {most}",
                {"given": len(self.expected_lengths), "most": self.most_sequences},
            )
        return self

    @property
    def tokens(self) -> int:
        """The tokens of all expected sequences together."""
        return sum(self.expected_lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest that is expected."""
        return max(self.expected_lengths)

    def times(self, count: int) -> "Packing":
        """Return so many of these packings, one behind the other."""
        return Packing(
            most_sequences=count * self.most_sequences,
            expected_lengths=count * self.expected_lengths,
        )

    @classmethod
    def of(cls, lengths: tuple[int, ...]) -> "Packing":
        """Return the packing of these lengths, with room for no more sequences."""
        return cls(most_sequences=max(1, len(lengths)), expected_lengths=lengths)


Result = Literal["loss", "log_probs", "logits"]


class Cache(Node):
    """The keys and values that generating text keeps of each sequence, from step to step.

    Attributes:
        room: tokens of a sequence that there is room for.
        filled: tokens that are there before the step; the step adds `seq_len` more.
    """

    room: PositiveCount
    filled: Count = 0


class Workload(Node):
    """A step is `rounds_per_step` rounds of `chunks_per_round` chunks of `chunk_tokens` tokens.

    A chunk packs whole sequences (chunk_tokens a multiple of seq_len) or is a contiguous slice
    of one (seq_len a multiple of chunk_tokens); then a round holds whole sequences. With
    `packing` a chunk packs whole sequences of any lengths, `seq_len` at most.

    A step that is `forward_only`, of an evaluation, is the forward of one round and its loss:
    nothing is updated. With a `cache` it is one of generating text: of each sequence `seq_len`
    tokens are computed, after those that the cache has, and the logits of the last one. Without
    one its `result` may be log_probs, of the label of each token, or the logits of all of them,
    beside the loss.
    """

    seq_len: PositiveCount
    chunk_tokens: PositiveCount
    chunks_per_round: PositiveCount
    rounds_per_step: PositiveCount
    packing: Packing | None = None
    forward_only: bool = False
    cache: Cache | None = None
    result: Result = "loss"

    @model_validator(mode="after")
    def _results_are_of_forward(self) -> Self:
        if self.result != "loss" and (not self.forward_only or self.cache is not None):
            raise PydanticCustomError(
                "result_of_training",
                "{result} of every token are what a step hands out that is forward_only, without "
                "a cache",
                {"result": self.result},
            )
        return self

    @model_validator(mode="after")
    def _cache_has_room(self) -> Self:
        if self.cache is None:
            return self
        if not self.forward_only or self.packing is not None or self.sliced:
            raise PydanticCustomError(
                "cache_of_training",
                "a cache of keys and values is of whole sequences of one length that are only "
                "computed forward",
            )
        if self.cache.filled + self.seq_len > self.cache.room:
            raise PydanticCustomError(
                "cache_too_small",
                "a cache of {room} tokens has no room for {seq_len} more behind {filled}",
                {"room": self.cache.room, "seq_len": self.seq_len, "filled": self.cache.filled},
            )
        return self

    @model_validator(mode="after")
    def _forward_is_one_round(self) -> Self:
        if self.forward_only and self.rounds_per_step != 1:
            raise PydanticCustomError(
                "forward_of_rounds",
                "a step that is forward_only has one round, not {rounds}: what rounds add up is "
                "gradients",
                {"rounds": self.rounds_per_step},
            )
        return self

    @model_validator(mode="after")
    def _packing_fills_chunks(self) -> Self:
        packing = self.packing
        if packing is None:
            return self
        fits = packing.longest <= self.seq_len <= self.chunk_tokens
        if packing.tokens != self.chunk_tokens or not fits:
            raise PydanticCustomError(
                "lengths_do_not_fit",
                "expected_lengths must add up to chunk_tokens {chunk_tokens}, none longer than "
                "seq_len {seq_len}, nor that than a chunk: these add up to {total}, and the "
                "longest is {longest}",
                {
                    "chunk_tokens": self.chunk_tokens, "seq_len": self.seq_len,
                    "total": packing.tokens, "longest": packing.longest,
                },
            )  # fmt: skip
        return self

    @model_validator(mode="after")
    def _chunks_fit_sequences(self) -> Self:
        if self.packing is not None:
            return self
        longer, shorter = sorted((self.seq_len, self.chunk_tokens), reverse=True)
        if longer % shorter:
            raise PydanticCustomError(
                "chunk_does_not_fit",
                "a chunk of {chunk_tokens} tokens neither packs nor slices sequences of "
                "{seq_len} tokens: one must be a multiple of the other",
                {"chunk_tokens": self.chunk_tokens, "seq_len": self.seq_len},
            )
        if self.chunks_per_round % self.chunks_per_sequence:
            raise PydanticCustomError(
                "round_splits_sequence",
                "a round of {chunks} chunks splits a sequence, which is {per_sequence} chunks",
                {"chunks": self.chunks_per_round, "per_sequence": self.chunks_per_sequence},
            )
        return self

    @model_serializer(mode="wrap")
    def _without_what_is_empty(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = serialize(self)
        if self.packing is None:
            written.pop("packing", None)  # which is not there without what is None
        if not self.forward_only:
            written.pop("forward_only", None)
        if self.cache is None:
            written.pop("cache", None)
        if self.result == "loss":
            written.pop("result", None)
        return written

    @property
    def most_pairs(self) -> int:
        """Pairs of packed sequences that a chunk has room for."""
        return 0 if self.packing is None else self.packing.most_sequences // 2

    @property
    def forward(self) -> "Workload":
        """The forward of one round of this."""
        return self.model_copy(update={"rounds_per_step": 1, "forward_only": True})

    @property
    def chunks_per_sequence(self) -> int:
        return 1 if self.packing else max(1, self.seq_len // self.chunk_tokens)

    @property
    def tokens_per_step(self) -> int:
        return self.chunk_tokens * self.chunks_per_round * self.rounds_per_step

    @property
    def sequences_per_step(self) -> int:
        """The sequences of a step; with `packing`, as many as are expected."""
        chunks = self.chunks_per_round * self.rounds_per_step
        if self.packing is not None:
            return chunks * len(self.packing.expected_lengths)
        return self.tokens_per_step // self.seq_len

    @property
    def sliced(self) -> bool:
        return self.chunk_tokens < self.seq_len


class ModelRef(Node):
    """The model a document was made for; `spec` is its whole specification."""

    name: str
    content_hash: str
    spec: dict[str, JsonValue]


class MachineRef(Node):
    """The machine a schedule was planned for."""

    name: str
    content_hash: str
