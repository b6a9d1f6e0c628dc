"""Flat tensors to a Hugging Face folder, a group at a time."""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Self

import torch

from twinstream.executor.weights.carried_tensors.carried import CarriedTensors
from twinstream.executor.weights.durable_files import (
    make_room,
    sync,
    write_file,
    write_files,
    writing,
)
from twinstream.executor.weights.errors import WeightsError, some_of
from twinstream.executor.weights.hf_files import INDEX, SINGLE, has_weights, weight_map
from twinstream.executor.weights.hf_folder import next_token_layers, stored_tensors
from twinstream.executor.weights.model_files import model_files
from twinstream.executor.weights.safetensors_header import read_header
from twinstream.executor.weights.weight_file import WeightFile
from twinstream.models.hf_weights import HfWeight, has_fused_experts, hf_weights
from twinstream.models.layout import ROUTER_BIAS
from twinstream.models.spec import ModelSpec

MAX_SHARD_BYTES = 5 * 10**9
FIRST, OTHERS = "model-00001-of-00002.safetensors", "model-carried.safetensors"


@dataclass(frozen=True)
class HfOutline:
    """All of a folder but the values of its weights: nothing is asked of another folder later.

    Attributes:
        division: by file name, the weights it holds.
        files: config.json, tokenizer and so on, by name.
        carried: tensors that are written as they are in the folder that is taken over.
    """

    spec: ModelSpec
    division: Mapping[str, Sequence[HfWeight]]
    files: Mapping[str, bytes]
    carried: CarriedTensors = field(default_factory=CarriedTensors)

    @classmethod
    def of(
        cls, spec: ModelSpec, like: Path | None = None, max_shard_bytes: int = MAX_SHARD_BYTES
    ) -> Self:
        """
        Args:
            like: a Hugging Face folder whose config.json, tokenizer and division into files are
                taken over; without weights of its own only the first two.
            max_shard_bytes: of tensors in one file, where `like` does not say; a tensor that is
                larger has a file of its own.

        Raises:
            WeightsError: the weights of `like` are divided without saying where a tensor is, or a
                file of it cannot be read.
            HfConfigError: there is no `like`, and no family of transformers is like this model.
        """
        files = model_files(spec, like)
        if like is None or not has_weights(like):
            return cls(spec, by_size(hf_weights(spec), max_shard_bytes), files)
        carried = CarriedTensors.of(next_token_layers(like, spec, stored_tensors(like)), spec.dtype)
        return cls(spec, _division(spec, like, carried.weights()), files, carried)

    def write(self, destination: Path, read_group: Callable[[str], torch.Tensor]) -> None:
        """Write weights, config.json and tokenizer as a folder that transformers loads unedited.

        Everything is on the disk when this returns. Where it raises, the folder is incomplete:
        write to a temporary name and rename. No more than one group is held at a time, and none is
        copied.

        Args:
            read_group: gives the flat parameters of `embedding`, a layer by its number, or `head`:
                1-D uint8 on the host, of the size of the group's layout. Called once each, in
                order.

        Raises:
            WeightsError: the folder has weights already or cannot be written.
        """
        read = self.carried.beside(read_group)
        write_weights(destination, self.spec.dtype, self.division, read, self.files)
        with writing(destination, 0):
            sync(destination)
            sync(destination.parent)


def write_weights(
    destination: Path, dtype: str, division: Mapping[str, Sequence[HfWeight]],
    read_group: Callable[[str], torch.Tensor], others: Mapping[str, bytes] = MappingProxyType({}),
) -> None:  # fmt: skip
    """Write other files, then those of a division, group by group, and their index if there is one.

    Raises:
        WeightsError: the folder has weights already or cannot be written.
    """
    shards = [WeightFile.of(destination / name, dtype, inside) for name, inside in division.items()]
    make_room(destination, sum(shard.size_bytes for shard in shards))
    if has_weights(destination):
        raise WeightsError(destination, "has weights already; write to another folder")
    write_files(destination, others)
    for shard in shards:
        shard.create()
    groups: dict[str, list[HfWeight]] = {}
    for weight in (weight for inside in division.values() for weight in inside):
        groups.setdefault(weight.group, []).append(weight)
    for group, weights in groups.items():
        flat = read_group(group)
        assert flat.dtype == torch.uint8
        assert flat.numel() >= max(weight.end_bytes for weight in weights), (group, flat.shape)
        for shard in shards:
            shard.write(weights, flat)
    for shard in shards:
        with writing(shard.path, shard.size_bytes):
            sync(shard.path)
    if list(division) != [SINGLE]:
        write_file(destination / INDEX, _index(division))


def add_weights(folder: Path, carried: CarriedTensors) -> None:
    """Add tensors to a folder that has weights: a file of their own, and an index that says so.

    Raises:
        WeightsError: they cannot be read or written.
    """
    weights = carried.weights()
    if not weights:
        return
    mapped = weight_map(folder)
    there = dict.fromkeys(read_header(folder / SINGLE), FIRST) if mapped is None else mapped
    if mapped is None:
        with writing(folder / FIRST, 0):
            (folder / SINGLE).rename(folder / FIRST)
    file = WeightFile.of(folder / OTHERS, "float32", weights)
    make_room(folder, file.size_bytes)
    file.create()
    for weight in weights:
        file.write([weight], carried.read(weight.name))
    with writing(file.path, file.size_bytes):
        sync(file.path)
    sizes = sum(one.size_bytes for name in set(there.values())
                for one in read_header(folder / name).values())  # fmt: skip
    index = {
        "metadata": {"total_size": sizes + sum(weight.size_bytes for weight in weights)},
        "weight_map": dict(sorted({**there, **{w.name: OTHERS for w in weights}}.items())),
    }
    write_file(folder / INDEX, json.dumps(index, indent=2).encode() + b"\n")


def _division(
    spec: ModelSpec, like: Path, carried: Sequence[HfWeight]
) -> dict[str, list[HfWeight]]:
    """By file name, what it holds."""
    mapped = weight_map(like)
    names = read_header(like / SINGLE) if mapped is None else mapped
    weights = [*hf_weights(spec, fused=has_fused_experts(spec, names)), *carried]
    if mapped is None:
        return {SINGLE: weights}
    if missing := [weight.name for weight in weights if weight.name not in mapped]:
        raise WeightsError(
            like / INDEX,
            f"does not say in which file {some_of(missing)} is, "
            "so that transformers would not load it; fetch it again",
        )
    files: dict[str, list[HfWeight]] = defaultdict(list)
    for weight in weights:
        files[mapped[weight.name]].append(weight)
    return files


def by_size(
    weights: Sequence[HfWeight], max_shard_bytes: int = MAX_SHARD_BYTES
) -> dict[str, list[HfWeight]]:
    """Divide weights into files of at most `max_shard_bytes`, in order, as transformers does."""
    shards: list[list[HfWeight]] = [[]]
    num_bytes = 0
    for weight in weights:
        if shards[-1] and num_bytes + weight.size_bytes > max_shard_bytes:
            shards.append([])
            num_bytes = 0
        shards[-1].append(weight)
        num_bytes += weight.size_bytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {
        f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)
    }


def _index(files: Mapping[str, Sequence[HfWeight]]) -> bytes:
    weights = [weight for inside in files.values() for weight in inside]
    trained = [weight for weight in weights if not weight.group.endswith(ROUTER_BIAS)]
    index = {
        "metadata": {
            "total_parameters": sum(prod(weight.shape) for weight in trained),
            "total_size": sum(weight.size_bytes for weight in weights),
        },
        "weight_map": dict(
            sorted((weight.name, file) for file, inside in files.items() for weight in inside)
        ),
    }
    return json.dumps(index, indent=2).encode() + b"\n"
