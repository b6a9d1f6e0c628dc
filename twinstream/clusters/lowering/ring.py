"""Attention's core around a ring of ranks."""

from twinstream.clusters.job import Job
from twinstream.clusters.lowering.builder import StageBuilder, Use
from twinstream.clusters.lowering.parts import Ring
from twinstream.schedule.cost import Work
from twinstream.schedule.ops import Mode


class RingOps:
    """Each step works on one block of keys and values while the next one is on its way."""

    def __init__(self, builder: StageBuilder, job: Job) -> None:
        self._b, self._dtype = builder, job.dtype

    def emit(
        self, ring: Ring, layer: int, tag: str, works: tuple[Work, ...], uses: list[Use], j: int
    ) -> None:
        """The steps of one layer and microbatch; `uses`: what flows in, what it makes, the rest."""
        b = self._b
        tensor = f"kv.{tag}"  # own block and those that come: version 1 of it on every rank
        backward = tag.startswith("b")
        pool, size = "kv.b" if backward else "kv.f", ring.sent_bytes(backward=backward)
        block = b.exchanged(pool, size, "context", self._dtype, tensor, spare=1)
        made: list[Use] = [uses[0], ("kv", block, "write")]
        b.compute(f"kv.{tag}", "kv", (), made, b.label("kv", layer, microbatch=j))
        (name, out, _), call = uses[1], "core.b" if backward else "core.f"
        for step in range(ring.num_steps):
            after = None
            if step + 1 < ring.num_steps:
                after = b.exchanged(pool, size, "context", self._dtype, tensor, spare=1)
                label = b.label("ring", layer, microbatch=j)
                sent: list[Use] = [("kv", block, "read")]
                heard: list[Use] = [("kv", after, "write")]
                send, recv = f"ring_send.{tag}.{step}", f"ring_recv.{tag}.{step}"
                b.communicate(send, "send", (("cp",), "cp.send"), sent, label, 1)
                b.communicate(recv, "recv", (("cp",), "cp.recv"), heard, label, -1)
            made_so_far: Mode = "update" if step else "write"
            # what is saved is there since the first step
            rest = [use for use in uses[2:] if not step or use[2] != "write"]
            operands: list[Use] = [uses[0], (name, out, made_so_far), ("kv", block, "read"), *rest]
            label = b.label("core", layer, microbatch=j)
            b.compute(f"core.{tag}.{step}", call, works, operands, label)
            block = after or block
