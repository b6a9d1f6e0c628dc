"""Tokens of blocks on disk, by what they were made of."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from twinstream.data.data_error import unreadable
from twinstream.data.encoding.block_tokens import BlockTokens
from twinstream.schedule.files import DocumentError, read_bytes, write_bytes


@dataclass(frozen=True)
class TokenCache:
    """A folder of files named by the hash of content and recipe; runs may share it.

    Files are written whole, under a name of their own first; one that is damaged is as if it
    were not there. Nothing is ever removed: delete the folder, even under a run, to have its room.
    """

    folder: Path

    def get(self, key: str) -> BlockTokens | None:
        path = self._path(key)
        try:
            return BlockTokens.from_bytes(read_bytes(path))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise unreadable(path, error) from None

    def put(self, key: str, tokens: BlockTokens) -> None:
        """Keep them, if there is room: they can be made again."""
        path = self._path(key)
        with suppress(OSError, DocumentError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(tokens.to_bytes(), path)

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.tokens"
