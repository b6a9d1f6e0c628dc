"""The seed system's places: fixed slots of both memories, named by what they hold."""

from collections.abc import Iterable

from twinstream.fidelity.seed_system.sizing import Sizing
from twinstream.models.flops import SavedLevel
from twinstream.models.spec import ModelSpec
from twinstream.planner.lifetimes.live_bytes import align_up
from twinstream.schedule.chain import Chain
from twinstream.schedule.tensors import DEVICE, HOST, Slot, Tensor, Tier

SAVED_UNITS = {
    SavedLevel.INPUT: ("input", "kv"),
    SavedLevel.ATTENTION: ("input", "kv", "attention"),
    SavedLevel.FULL: ("input", "kv", "attention", "projections"),
}
_ENDS = ("embedding", "head")
_STATE = ("param", "grad", "opt")


class SlotMap:
    """Rings of slots on the device, a home on the host for all that leaves it.

    Layer k's parameters are in block k mod n, its gradients in block k mod g, its Adam state in
    block k mod o, activation a (layer-major) in slot a mod s. The blocks of Adam state share the
    bytes of activation slots and scratch. What the seed system takes beyond what the chain's
    tensors need is one reserved slot of each memory, which no op uses.
    """

    def __init__(self, spec: ModelSpec, chain: Chain, sizing: Sizing) -> None:
        self.spec, self.sizing = spec, sizing
        self.tensors = {t.tensor_id: t for t in chain.tensors}
        self.sliced = chain.workload.sliced
        self.per_sequence = chain.workload.chunks_per_sequence
        self.slots: dict[str, Slot] = {}
        self._ends = {DEVICE: 0, HOST: 0}
        self._place_device(chain)
        self._place_host()
        self._reserve()

    def block(self, kind: str, layer: int) -> str:
        """Device slot of a layer's `param`, `grad` or `opt`."""
        sizing = self.sizing
        count = {
            "param": sizing.param_blocks,
            "grad": sizing.grad_blocks,
            "opt": sizing.num_optimizer_blocks,
        }[kind]
        return f"device.{kind}.block{layer % count}"

    def saved(self, unit: str, act: int) -> str:
        """Device slot of one unit of an activation: `input`, `kv`, `attention`, `projections`."""
        return f"device.act{act % self.sizing.device_acts}.{unit}{self._part(unit, act)}"

    def home_of_saved(self, unit: str, act: int) -> str:
        return f"host.act{act}.{unit}"

    def hidden(self, layer: int, chunk: int) -> str:
        """Device slot of what goes into a layer: two take turns."""
        return f"device.transition{layer % 2}.{chunk}"

    def d_hidden(self, chunk: int) -> str:
        """The slot beside the one that the head reads."""
        return self.hidden(self.spec.num_layers + 1, chunk)

    def saved_tensor(self, unit: str, layer: int, chunk: int) -> str:
        if unit == "kv" and self.sliced:
            sequence, position = divmod(chunk, self.per_sequence)
            return f"kv.{layer}.{sequence}.part{position}"
        return f"{unit}.{layer}.{chunk}"

    def _part(self, unit: str, act: int) -> str:
        """Chunks are different parts of their sequence's context, so that each has its own name."""
        if unit != "kv" or not self.sliced:
            return ""
        chunk = act % self.sizing.chunks_per_round
        return f".part{chunk % self.per_sequence}"

    def _place_device(self, chain: Chain) -> None:
        sizing, chunks = self.sizing, range(self.sizing.chunks_per_round)
        for kind in _STATE:
            for group in _ENDS:
                self._add(f"device.{kind}.{group}", DEVICE, self.tensors[f"{kind}.{group}"])
        for name in ("step_state", "loss", *(f"tokens.{c}" for c in chunks)):
            self._add(f"device.{name}", DEVICE, self.tensors[name])
        for turn in (0, 1):
            for chunk in chunks:
                self._add(f"device.transition{turn}.{chunk}", DEVICE, self.tensors["d_hidden.0"])
        if self.sliced:
            self._add("device.context", DEVICE, self.tensors["kv.0.0"])
            self._add("device.d_context", DEVICE, self.tensors["d_context.0"])
        for kind, count in (("param", sizing.param_blocks), ("grad", sizing.grad_blocks)):
            for block in range(count):
                self._add(f"device.{kind}.block{block}", DEVICE, self.tensors[f"{kind}.0"])
        shared = self._ends[DEVICE]
        self._place_acts()
        scratch = [t for t in chain.tensors if t.role == "scratch"]
        if scratch:
            largest = max(scratch, key=lambda t: t.size_bytes)
            self._add("device.scratch", DEVICE, largest)
        end, self._ends[DEVICE] = self._ends[DEVICE], shared
        for block in range(sizing.num_optimizer_blocks):
            self._add(f"device.opt.block{block}", DEVICE, self.tensors["opt.0"])
        self._ends[DEVICE] = max(end, self._ends[DEVICE])

    def _place_acts(self) -> None:
        for act in range(self.sizing.device_acts):
            for unit in SAVED_UNITS[SavedLevel.FULL]:
                names = [""]
                if unit == "kv" and self.sliced:
                    names = [f".part{position}" for position in range(self.per_sequence)]
                start = self._ends[DEVICE]
                for position, part in enumerate(names):
                    self._ends[DEVICE] = start
                    tensor = self.tensors[self.saved_tensor(unit, 0, position)]
                    self._add(f"device.act{act}.{unit}{part}", DEVICE, tensor)

    def _place_host(self) -> None:
        chunks = self.sizing.chunks_per_round
        for group in _ENDS:
            self._add(f"host.param.{group}", HOST, self.tensors[f"param.{group}"])
        for layer in range(self.spec.num_layers):
            for kind in _STATE:
                self._add(f"host.{kind}.{layer}", HOST, self.tensors[f"{kind}.{layer}"])
        for name in ("step_state", "loss", *(f"tokens.{c}" for c in range(chunks))):
            self._add(f"host.{name}", HOST, self.tensors[name])
        for act, level in enumerate(self.sizing.levels):
            for unit in SAVED_UNITS[level]:
                tensor = self.saved_tensor(unit, *divmod(act, chunks))
                self._add(self.home_of_saved(unit, act), HOST, self.tensors[tensor])

    def _reserve(self) -> None:
        used = {DEVICE: self.sizing.used_device_bytes, HOST: self.sizing.used_host_bytes}
        for tier, used_bytes in used.items():
            left = used_bytes - self._ends[tier]
            if left > 0:
                self._put(f"{tier.kind}.reserved", tier, left, 0)

    def _add(self, slot_id: str, tier: Tier, tensor: Tensor) -> None:
        self._put(slot_id, tier, tensor.size_bytes, tensor.offset_bytes)

    def _put(self, slot_id: str, tier: Tier, size_bytes: int, origin_bytes: int) -> None:
        self.slots[slot_id] = Slot(
            slot_id=slot_id,
            tier=tier,
            offset_bytes=self._ends[tier],
            size_bytes=size_bytes,
            origin_bytes=origin_bytes,
        )
        self._ends[tier] += align_up(size_bytes)


def extent_bytes(slots: Iterable[Slot], tier: Tier) -> int:
    """End of a memory's last slot."""
    return max(s.offset_bytes + s.size_bytes for s in slots if s.tier == tier)
