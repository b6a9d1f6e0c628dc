"""CPUs near a GPU, from a made-up sysfs."""

from pathlib import Path

import pytest

from twinstream.executor.memory.numa import cpus_near


def machine(root: Path, node: str) -> Path:
    device = root / "sys/bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text(node)
    folder = root / "sys/devices/system/node/node1"
    folder.mkdir(parents=True)
    (folder / "cpulist").write_text("8-10,24\n")
    return root


def test_the_cpus_of_the_gpus_node_are_near(tmp_path):
    assert cpus_near("0000:3B:00.0", machine(tmp_path, "1\n")) == {8, 9, 10, 24}


@pytest.mark.parametrize("node", ["-1\n", "7\n", "what\n"])
def test_a_machine_that_does_not_say_prefers_none(tmp_path, node):
    assert cpus_near("0000:3b:00.0", machine(tmp_path, node)) == set()


@pytest.mark.parametrize("address", ["0000:99:00.0", ""])
def test_a_device_that_is_not_there_prefers_none(tmp_path, address):
    assert cpus_near(address, machine(tmp_path, "1\n")) == set()
