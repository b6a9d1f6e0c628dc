"""Small blocks and groups, so that small files have many."""

import pytest

from twinstream.data import training_data


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of about 600 bytes, and groups of 4 of them."""
    monkeypatch.setattr(training_data, "_BLOCK_BYTES", 600)
    monkeypatch.setattr(training_data, "_BLOCK_BYTES_PER_TOKEN_OF_LONGEST", 1)
    monkeypatch.setattr(training_data, "_GROUP_BYTES", 2400)
    monkeypatch.setattr(training_data, "_GROUP_CHUNKS", 1)
