"""Which layers are on which virtual stage."""

from twinstream.clusters.layout import Layout, LayoutError


def stages_of(layout: Layout, num_layers: int) -> tuple[range, ...]:
    """The layers of every virtual stage, in the order of the model; stage g is on rank g % pp.

    As the layout says; else equally many; where they do not divide, embedding and head count as a
    layer each if that divides, else the first stages have one more.

    Raises:
        LayoutError: there are fewer layers than stages, or the layout's do not add up.
    """
    count = layout.pp * layout.virtual_stages
    sizes = layout.stage_layers
    if sizes is not None:
        if len(sizes) != count or sum(sizes) != num_layers:
            raise LayoutError(
                f"stage_layers has {len(sizes)} stages of {sum(sizes)} layers together, and the "
                f"layout pp x virtual_stages = {count} of {num_layers} layers"
            )
    elif num_layers < count:
        raise LayoutError(
            f"{num_layers} layers are fewer than pp x virtual_stages = {layout.pp} x "
            f"{layout.virtual_stages} stages"
        )
    elif num_layers % count and (num_layers + 2) % count == 0 and count > 1:
        each = (num_layers + 2) // count
        sizes = (each - 1, *(each,) * (count - 2), each - 1)
    else:
        each, more = divmod(num_layers, count)
        sizes = tuple(each + (stage < more) for stage in range(count))
    starts = [sum(sizes[:stage]) for stage in range(count)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))
