"""The files that a run has on a drive: of frozen weights the model's own, or copies made once.

A group is read where the model's files have it, if they lie under the folder that the user named
and hold it byte for byte as it is trained beside. Any other is written there once, as it lies in
memory, and is there for the next run of the same model. What is trained lies in a file of the
run's own, which is gone when the run is.
"""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from twinstream.hardware_profiles.memories import DISK_READS, DISK_WRITES
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.residence import PARAMETERS, groups_on_disk
from twinstream.models.providers.trained import layout_of
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.sizes import brief
from twinstream.schedule.tensors import DISK
from twinstream.training.machine import Tell
from twinstream.training.model_opening import OpenedModel
from twinstream.training.options import OptionsError, TrainOptions

if TYPE_CHECKING:
    from twinstream.executor.providers.provider import Extents, Provider
    from twinstream.executor.weights.disk_reader import DiskFiles

_COPIES = "twinstream-weights-"  # begins the name of a folder with copies


def disk_files(
    schedule: RankSchedule, model: OpenedModel, options: TrainOptions, machine: Machine, tell: Tell
) -> "DiskFiles | None":
    """Find the files of what a schedule has on a disk and only reads, and make copies of what no
    file has; None of one that has nothing there.

    Raises:
        WeightsError: a file has gone, or a copy cannot be written.
        OptionsError: an adapter that is gone on from has frozen weights of its own.
    """
    if all(slot.tier != DISK for slot in schedule.slots):
        return None
    groups = groups_on_disk(schedule)
    from twinstream.executor.providers.registry import provider_of
    from twinstream.executor.weights.disk_reader import DiskFiles

    assert options.disk is not None, "a plan with a disk is of a run with one"
    recipe, provider = Recipe.model_validate(schedule.recipe), provider_of(model.spec)
    place, found = options.disk.absolute(), dict[str, "Extents"]()
    _require_own_base(recipe, options)
    for group in groups if model.folder is not None else ():
        assert model.folder is not None
        there = provider.in_place(model.folder, model.spec, recipe, group)
        if there is not None and all(_lies_in(one.path, place) for one in there):
            found[group] = there
    if copied := [group for group in groups if group not in found]:
        found |= _copies(copied, model, recipe, options, provider, tell)
    extents = {f"{PARAMETERS}{group}": found[group] for group in groups}
    rate, limited = machine.rate(DISK_READS.rate_field), options.disk_bandwidth is not None
    files = DiskFiles(extents, rate, limited, tell)
    if machine.disk_write_bytes_per_s is None:
        return files
    written, overlap = machine.rate(DISK_WRITES.rate_field), machine.number("disk_overlap")
    return replace(files, place=place, written_bytes_per_s=written, overlap=overlap)


def _lies_in(path: Path, place: Path) -> bool:
    return path.absolute().is_relative_to(place) or path.resolve().is_relative_to(place.resolve())


def _require_own_base(recipe: Recipe, options: TrainOptions) -> None:
    saved = recipe.lora is not None and recipe.lora.saved
    if saved and options.adapter is not None:
        raise OptionsError(
            f"disk: {options.adapter} has weights of the base of its own "
            f"({', '.join(recipe.lora.saved if recipe.lora else ())}), which are not read from a "
            "disk yet: leave out --disk"
        )


def _copies(
    groups: Sequence[str], model: OpenedModel, recipe: Recipe, options: TrainOptions,
    provider: "Provider", tell: Tell,
) -> dict[str, "Extents"]:  # fmt: skip
    """Files of groups under the folder that the user named, made where they are not there yet."""
    from twinstream.executor.state.sources import in_their_base
    from twinstream.executor.weights.base_cache import BaseCache
    from twinstream.executor.weights.disk_reader import FileExtent
    from twinstream.executor.weights.hf_folder import stored_tensors

    spec, folder = model.spec, model.folder
    made_of: dict[str, object] = {
        "base": recipe.base, "dtype": spec.dtype, "model": spec.ref().content_hash,
    }  # fmt: skip
    files: set[Path] = set()
    if folder is None:
        made_of["seed"] = options.seed
    else:
        files = {one for stored in stored_tensors(folder).values() for one in stored.files}
    source = "" if folder is None else str(folder.resolve())
    key = sha256(f"{sorted(made_of.items())} {source}".encode()).hexdigest()[:12]
    assert options.disk is not None
    place = options.disk / f"{_COPIES}{key}"
    sizes = {group: layout_of(spec, recipe, group).size_bytes for group in groups}
    kept = BaseCache(place, files, made_of, sizes, tell)
    if missing := [group for group in groups if not kept.has(group)]:
        size = sum(sizes[group] for group in missing)
        tell(f"writing {brief(size)} of frozen weights to {place}, which are read from there")

        if folder is None:
            weights = in_their_base(provider.fresh(spec, options.seed), spec, recipe)
        else:
            others = [one for one in spec.parameter_groups if one not in missing]
            weights = provider.parameters(folder, spec, recipe, None, tell, others)
        kept.write((group, flat) for group, flat in weights if group in missing)
    return {group: (FileExtent(kept.file(group), 0, sizes[group], 0),) for group in groups}
