"""The files that a run has on a drive: of frozen weights the model's own, or copies made once.

A group is read where the model's files have it, if they lie under the folder that the user named
and hold it byte for byte as it is trained beside. Any other is written there once, as it lies in
memory, and is there for the next run of the same model. What is trained, and parts of frozen
groups that ranks split, lie in a file of each rank's own, which is gone when the run is.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from twinstream.hardware_profiles.memories import DISK_READS, DISK_WRITES
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.residence import PARAMETERS, groups_on_disk
from twinstream.models.providers.trained import layout_of
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.cluster.projecting import RankPart
from twinstream.schedule.sizes import brief
from twinstream.schedule.tensors import DISK
from twinstream.simulator.network_costs import share_of
from twinstream.training.machine import Tell
from twinstream.training.model_opening import OpenedModel
from twinstream.training.options import OptionsError, TrainOptions

if TYPE_CHECKING:
    from twinstream.executor.providers.provider import Extents, Provider
    from twinstream.executor.state.parted_state import RankStates
    from twinstream.executor.weights.disk_reader import DiskFiles

_COPIES = "twinstream-weights-"  # begins the name of a folder with copies


@dataclass(frozen=True)
class FilesOfRanks:
    """By rank the files of what is at home on a disk, none where nothing is; and the groups that
    every rank that has them finds there, so that nobody gives them."""

    each: "tuple[DiskFiles, ...]" = ()
    groups: Collection[str] = ()


def disk_files(
    parts: Sequence[RankPart], states: "RankStates | None", model: OpenedModel,
    options: TrainOptions, machine: Machine, tell: Tell,
) -> FilesOfRanks:  # fmt: skip
    """Find the files of what ranks have on a disk and only read, and make copies of what no file
    has.

    Args:
        machine: whose drive is shared by all ranks of it.

    Raises:
        WeightsError: a file has gone, or a copy cannot be written.
        OptionsError: an adapter that is gone on from has frozen weights of its own; or ranks split
            what is on a drive that is only read.
    """
    schedules = [part.schedule for part in parts]
    if all(slot.tier != DISK for one in schedules for slot in one.slots):
        return FilesOfRanks()
    from twinstream.executor.providers.registry import provider_of
    from twinstream.executor.state.parted_state import place_of
    from twinstream.executor.weights.disk_reader import DiskFiles

    def extent(group: str, part: RankPart) -> tuple[int, int] | None:
        if states is None:
            return 0, layout_of(model.spec, recipe, group).size_bytes
        return states.extent(group, place_of(part.coordinates, states.layout.ep))

    assert options.disk is not None, "a plan with a disk is of a run with one"
    recipe, provider = Recipe.model_validate(schedules[0].recipe), provider_of(model.spec)
    on_disk = groups_on_disk(*schedules)
    groups = [group for group in on_disk if extent(group, parts[0]) is not None]
    if len(groups) < len(on_disk) and machine.disk_write_bytes_per_s is None:
        raise OptionsError(
            "disk: ranks that split frozen weights (--tp) write their parts to a file of their own "
            "when a run begins: state the rate of writes, too, --disk-bandwidth 7GB/s,5GB/s"
        )
    place, found = options.disk.absolute(), dict[str, "Extents"]()
    _require_own_base(recipe, options)
    for group in groups if model.folder is not None else ():
        assert model.folder is not None
        there = provider.in_place(model.folder, model.spec, recipe, group)
        if there is not None and all(_lies_in(one.path, place) for one in there):
            found[group] = there
    if copied := [group for group in groups if group not in found]:
        found |= _copies(copied, model, recipe, options, provider, tell)
    share = share_of(machine, options.ranks_on_host)
    files = DiskFiles({}, share.rate(DISK_READS.rate_field), options.disk_bandwidth is not None)
    if machine.disk_write_bytes_per_s is not None:
        written, overlap = share.rate(DISK_WRITES.rate_field), machine.number("disk_overlap")
        files = replace(files, place=place, written_bytes_per_s=written, overlap=overlap)
    each = []
    for part in parts:
        cuts = {group: extent(group, part) for group in groups}
        own = {
            f"{PARAMETERS}{group}": tuple(p for one in found[group] if (p := one.within(*cut)))
            for group, cut in cuts.items()
            if cut is not None
        }
        each.append(replace(files, extents=own))
    alone = groups_on_disk(*schedules, alone=True)
    return FilesOfRanks(tuple(each), [group for group in alone if group in groups])


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
