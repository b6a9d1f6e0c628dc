"""Tokens of blocks on disk, by what they were made of."""

from dataclasses import dataclass
from pathlib import Path

from twinstream.data.data_error import DataError, unreadable
from twinstream.data.encoding.block_tokens import BlockTokens
from twinstream.schedule.files import write_bytes


@dataclass(frozen=True)
class TokenCache:
    """A folder of files named by the hash of content and recipe; runs may share it.

    Files are written whole, under a name of their own first; one that is damaged is as if it
    were not there. Nothing is ever removed: delete the folder to have its room again.
    """

    folder: Path

    def get(self, key: str) -> BlockTokens | None:
        path = self._path(key)
        try:
            return BlockTokens.from_bytes(path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise unreadable(path, error) from None

    def put(self, key: str, tokens: BlockTokens) -> None:
        """Raises DocumentError if it cannot be written."""
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(
                f"cannot make the folder {path.parent} for tokens: {error.strerror or error}; "
                "name another one, or none"
            ) from None
        write_bytes(tokens.to_bytes(), path)

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.tokens"
