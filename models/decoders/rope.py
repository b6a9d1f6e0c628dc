"""What a Hugging Face config.json says of RoPE, under the keys of transformers 4 or 5."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from twinstream.models.decoders.experts import READ_STRICTLY
from twinstream.models.options import PositiveFinite, RopeScaling


class RopeOfConfig(BaseModel):
    """`rope_parameters` of transformers 5, or `rope_scaling` of 4."""

    model_config = READ_STRICTLY

    rope_type: str | None = None
    type: str | None = None
    rope_theta: PositiveFinite | None = None
    partial_rotary_factor: float | None = None

    @property
    def kind(self) -> str:
        """Name of the rule by which frequencies are stretched."""
        return self.rope_type or self.type or "default"

    @property
    def scaling(self) -> dict[str, Any]:
        """What is given of a RopeScaling."""
        if self.kind == "default":
            return {}
        extra = self.model_extra or {}
        return {name: extra[name] for name in RopeScaling.model_fields if name in extra}


class RopeKeys(BaseModel):
    """The keys that are read of RoPE."""

    model_config = READ_STRICTLY

    rope_theta: PositiveFinite | None = None
    rope_parameters: RopeOfConfig | None = None
    rope_scaling: RopeOfConfig | None = None

    @property
    def ropes(self) -> dict[str, RopeOfConfig]:
        """By key; transformers writes one of the two."""
        ropes = {"rope_parameters": self.rope_parameters, "rope_scaling": self.rope_scaling}
        return {key: rope for key, rope in ropes.items() if rope is not None}

    @property
    def rope_thetas(self) -> dict[str, float]:
        """Those that are given, by key."""
        thetas = {f"{key}.rope_theta": rope.rope_theta for key, rope in self.ropes.items()}
        thetas["rope_theta"] = self.rope_theta
        return {key: theta for key, theta in thetas.items() if theta is not None}

    def rotates_whole_heads(self, raw: Mapping[str, Any]) -> bool:
        """Whether a glm4_moe says so; half of them are what it means by saying nothing."""
        told = [rope.partial_rotary_factor for rope in self.ropes.values()]
        return 1 in [*told, raw.get("partial_rotary_factor")]


def rope_refusals(keys: RopeKeys, raw: Mapping[str, Any]) -> Iterator[tuple[str, object, str]]:
    """Key, value and reason of what is not implemented, or said twice and not alike."""
    for key, rope in keys.ropes.items():
        if rope.kind not in ("default", "llama3"):
            reason = (
                "only RoPE types 'default' and 'llama3' are; to plan, set it to null: "
                "neither time nor memory depends on it"
            )
            yield key, raw[key], reason
            continue
        if (factor := rope.partial_rotary_factor) not in (None, 1):
            yield f"{key}.partial_rotary_factor", factor, "not implemented"
        if rope.type not in (None, rope.kind):
            yield f"{key}.type", rope.type, f"rope_type says {rope.kind}"
        for name, value in (rope.model_extra or {}).items():
            if name not in rope.scaling:
                yield f"{key}.{name}", value, "unknown key"
    told = [(rope.kind, rope.scaling) for rope in keys.ropes.values()]
    if any(one != told[0] for one in told):
        yield "rope_scaling", raw["rope_scaling"], "rope_parameters says otherwise"
    thetas = keys.rope_thetas
    for key, theta in thetas.items():
        first, said = next(iter(thetas.items()))
        if theta != said:
            yield key, theta, f"{first} says {said}"
