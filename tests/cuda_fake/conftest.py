"""These tests run above the fake device alone: `make test-cuda-fake`."""

import os
from collections.abc import Iterator

import pytest

on_fake_device = "libcudart" in os.environ.get("LD_PRELOAD", "")
collect_ignore_glob = [] if on_fake_device else ["test_*.py"]

if on_fake_device:
    from tests.cuda_fake.device import FakeDevice

    @pytest.fixture
    def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
        """With an empty account; its phases are those of the runs."""
        found = FakeDevice()
        found.begin()
        found.name_phases(monkeypatch)
        yield found
        found.recover()
