"""The tokens of a block, and how they lie in a file."""

import json
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

_MAGIC = b"twtokens2\n"
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class BlockTokens:
    """Documents one after another.

    Attributes:
        ids: [N].
        learned: [N], whether a token is to be predicted.
        ends: [D], where each document ends; one may be empty.
        rows: [D], which of the block's rows each is of, or of its parts if it is of text.
        skipped: why a row could not be used, of those that are empty for that.
    """

    ids: NDArray[np.int32]
    learned: NDArray[np.bool_]
    ends: NDArray[np.int64]
    rows: NDArray[np.int64]
    skipped: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        """Return the tokens as bytes with a digest, by which damage is seen."""
        sizes = np.array([len(self.ids), len(self.ends)], "<i8").tobytes()
        body = b"".join(
            (
                sizes,
                self.ids.astype("<i4").tobytes(),
                np.packbits(self.learned).tobytes(),
                self.ends.astype("<i8").tobytes(),
                self.rows.astype("<i8").tobytes(),
                json.dumps(self.skipped).encode(),
            )
        )
        return _MAGIC + blake2b(body, digest_size=_DIGEST_BYTES).digest() + body

    @classmethod
    def from_bytes(cls, content: bytes) -> "BlockTokens | None":
        """Return the tokens of such bytes; None if they are damaged."""
        start = len(_MAGIC) + _DIGEST_BYTES
        body = content[start:]
        digest = blake2b(body, digest_size=_DIGEST_BYTES).digest()
        if content[:start] != _MAGIC + digest:
            return None
        num_tokens, num_documents = np.frombuffer(body, "<i8", count=2).tolist()
        packed_at = 16 + 4 * num_tokens
        ends_at = packed_at + -(-num_tokens // 8)
        packed = np.frombuffer(body[packed_at:ends_at], np.uint8)
        ends, rows = np.frombuffer(body[ends_at:], "<i8", count=2 * num_documents).reshape(2, -1)
        return cls(
            np.frombuffer(body, "<i4", count=num_tokens, offset=16).astype(np.int32),
            np.unpackbits(packed, count=num_tokens).astype(np.bool_),
            ends.astype(np.int64),
            rows.astype(np.int64),
            tuple(json.loads(body[ends_at + 16 * num_documents :])),
        )
