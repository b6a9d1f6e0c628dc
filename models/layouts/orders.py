"""In which order a stage of a pipeline runs its microbatches, forward and backward."""

from typing import Literal, NamedTuple

from twinstream.models.layouts.layout import Layout

Phase = Literal["forward", "backward", "weight"]


class Action(NamedTuple):
    """One microbatch through one virtual stage of a rank; `weight` is what zero-bubble puts off."""

    phase: Phase
    chunk: int
    microbatch: int


def actions_of(layout: Layout, stage: int, num_microbatches: int) -> list[Action]:
    """What a stage (0 the first) runs in a step, in order.

    | order | |
    |---|---|
    | gpipe | all forward, then all backward, both in order |
    | 1f1b | pp - 1 - stage forward ahead, then one forward, one backward in turn |
    | interleaved | the same over virtual stages, in groups of pp microbatches |
    | ring | breadth first: all microbatches through one virtual stage, then through the next |
    | zero_bubble | 1f1b with the gradients of weights put off by `stage` microbatches (H1) |

    Sources: Huang et al., arXiv:1811.06965; Narayanan et al., arXiv:2104.04473, section 2.2;
    Lamy-Poirier, arXiv:2211.05953; Qi et al., arXiv:2401.10241, section 2.
    """
    match layout.pipeline:
        case "gpipe":
            return _gpipe(num_microbatches)
        case "ring":
            return _breadth_first(layout.virtual_stages, num_microbatches)
        case "interleaved":
            return _interleaved(layout, stage, num_microbatches)
        case "1f1b":
            ahead = min(layout.pp - 1 - stage, num_microbatches)
            return _one_by_one(ahead, num_microbatches, put_off=None)
        case "zero_bubble":
            ahead = min(layout.pp - 1 - stage, num_microbatches)
            return _one_by_one(ahead, num_microbatches, put_off=stage)


def _gpipe(count: int) -> list[Action]:
    forward = [Action("forward", 0, j) for j in range(count)]
    return forward + [Action("backward", 0, j) for j in range(count)]


def _breadth_first(chunks: int, count: int) -> list[Action]:
    forward = [Action("forward", c, j) for c in range(chunks) for j in range(count)]
    return forward + [
        Action("backward", c, j) for c in reversed(range(chunks)) for j in range(count)
    ]


def _one_by_one(ahead: int, count: int, put_off: int | None) -> list[Action]:
    """With `put_off` the weight gradients follow so many microbatches later."""
    found = [Action("forward", 0, j) for j in range(ahead)]
    weighed = 0
    for j in range(count):
        if ahead + j < count:
            found.append(Action("forward", 0, ahead + j))
        found.append(Action("backward", 0, j))
        if put_off is not None and j >= put_off:
            found.append(Action("weight", 0, weighed))
            weighed += 1
    if put_off is not None:
        found += [Action("weight", 0, j) for j in range(weighed, count)]
    return found


def _interleaved(layout: Layout, stage: int, count: int) -> list[Action]:
    pp, chunks = layout.pp, layout.virtual_stages
    total = count * chunks
    ahead = total if count == pp else (pp - stage - 1) * 2 + (chunks - 1) * pp
    ahead = min(total, ahead)

    def action(phase: Phase, number: int) -> Action:
        group, inside = divmod(number, pp * chunks)
        chunk = inside // pp
        if phase == "backward":
            chunk = chunks - 1 - chunk
        return Action(phase, chunk, group * pp + inside % pp)

    found = [action("forward", k) for k in range(ahead)]
    for k in range(total):
        if ahead + k < total:
            found.append(action("forward", ahead + k))
        found.append(action("backward", k))
    return found
