"""What one training step processes, and which model and machine a document is about."""

from typing import Any, Self

from pydantic import (
    JsonValue,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from twinstream.schedule.node import Node
from twinstream.schedule.numbers import PositiveCount


class Workload(Node):
    """A step is `rounds_per_step` rounds of `chunks_per_round` chunks of `chunk_tokens` tokens.

    A chunk packs whole sequences (chunk_tokens a multiple of seq_len) or is a contiguous slice
    of one (seq_len a multiple of chunk_tokens); then a round holds whole sequences. Packed
    sequences of unequal lengths have these, in their order, as `sequence_lengths`, the same in
    every chunk; `seq_len` is then the longest of them.
    """

    seq_len: PositiveCount
    chunk_tokens: PositiveCount
    chunks_per_round: PositiveCount
    rounds_per_step: PositiveCount
    sequence_lengths: tuple[PositiveCount, ...] = ()

    @model_validator(mode="after")
    def _lengths_fill_chunks(self) -> Self:
        lengths = self.sequence_lengths
        if not lengths:
            return self
        if len(set(lengths)) == 1:
            raise PydanticCustomError(
                "lengths_are_equal",
                "sequence_lengths are for unequal ones; these are all {length}: leave them out",
                {"length": lengths[0]},
            )
        found = (sum(lengths), max(lengths))
        if found != (self.chunk_tokens, self.seq_len):
            raise PydanticCustomError(
                "lengths_do_not_fit",
                "sequence_lengths must add up to chunk_tokens {chunk_tokens}, the longest being "
                "seq_len {seq_len}: these add up to {total}, and the longest is {longest}",
                {
                    "chunk_tokens": self.chunk_tokens, "seq_len": self.seq_len,
                    "total": found[0], "longest": found[1],
                },
            )  # fmt: skip
        return self

    @model_validator(mode="after")
    def _chunks_fit_sequences(self) -> Self:
        if self.sequence_lengths:
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
        """Documents of equal lengths are those of before there were others."""
        written: dict[str, Any] = serialize(self)
        if not self.sequence_lengths:
            del written["sequence_lengths"]
        return written

    @property
    def chunks_per_sequence(self) -> int:
        return max(1, self.seq_len // self.chunk_tokens)

    @property
    def tokens_per_step(self) -> int:
        return self.chunk_tokens * self.chunks_per_round * self.rounds_per_step

    @property
    def sequences_per_step(self) -> int:
        chunks = self.chunks_per_round * self.rounds_per_step
        if self.sequence_lengths:
            return chunks * len(self.sequence_lengths)
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
