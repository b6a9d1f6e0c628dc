"""Generating text, as requests for plans: of the pass over the prompts, and of a token's step."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.providers.model import length_refusal
from twinstream.models.providers.trained import all_groups
from twinstream.planner.request import PlanRequest
from twinstream.schedule.errors import TwinstreamError, require_whole
from twinstream.schedule.workload import Cache

_MOST = 2**24


@dataclass(frozen=True)
class TextGeneration:
    """What is generated: `batch` sequences at a time, `decode` tokens behind `prompt` others.

    Raises:
        TwinstreamError: one is no whole number of at least one.
    """

    prompt: int
    decode: int
    batch: int = 1

    def __post_init__(self) -> None:
        for name in ("prompt", "decode", "batch"):
            require_whole(name, getattr(self, name), 1, _MOST)

    @property
    def room(self) -> int:
        """Tokens of a sequence that the cache has room for."""
        return self.prompt + self.decode

    def decoder_of(self, request: PlanRequest) -> ModelSpec:
        """Return the model that generates.

        Raises:
            TwinstreamError: it has no such cache, or no positions for so many tokens.
        """
        spec = request.spec
        if spec.decoder is None:
            raise TwinstreamError(
                f"'{spec.name}' runs by its own code, which keeps its keys and values itself: only "
                "models with kernels of twinstream's own are planned as generating"
            )
        if (why := length_refusal(spec, self.room)) is not None:
            raise TwinstreamError(why)
        return spec.decoder

    def steps(self, request: PlanRequest, parts: int = 1) -> Iterator[PlanRequest]:
        """Yield the requests: the prompts, the step of the first token behind them, of the last.

        Of the last token none is computed: it is the logits of the one before.

        Args:
            parts: into how many equal chunks the sequences are cut; 1 leaves that open.
        """
        spec, step = request.spec, request.step
        frozen = tuple(sorted(all_groups(spec, step.recipe)))
        recipe = step.recipe.model_copy(update={"frozen": frozen, "clips": False})
        last = max(self.prompt, self.room - 2)
        for seq_len, filled in ((self.prompt, 0), (1, self.prompt), (1, last)):
            yield replace(
                request,
                step=replace(
                    step, seq_len=seq_len, tokens_per_step=self.batch * seq_len, recipe=recipe,
                    chunk_tokens=step.chunk_tokens if parts == 1 else self.batch // parts * seq_len,
                    packing=None, forward_only=True, cache=Cache(room=self.room, filled=filled),
                ),
            )  # fmt: skip
