"""The reference of DPO: log-probabilities of pairs by the model as it is before training.

They are computed once, by forward passes in the arenas of the training, and kept beside the run;
with adapters the reference is the base. So no second model is ever in memory.
"""

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from time import monotonic

import numpy as np

from twinstream.data.packing import Chunk
from twinstream.executor.weights.durable_files import write_file
from twinstream.log.run_files import RunFiles
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import digests_of, open_file, read_bytes, reason_of
from twinstream.training.planning import RunData
from twinstream.training.preparing import Prepared
from twinstream.training.ranks.planning import Plan
from twinstream.training.run.pairs import KEY_BYTES, Floats, keys_of, log_probs_of
from twinstream.training.run.steps import StepData, batch_of, passes_of
from twinstream.training.server import TrainerServer

_MOST_PASSES, _ASKED_S = 16, 10.0  # passes asked for at a time, for about so long
_FORMAT = 1
_SAVED_EVERY_S = 60.0
_PARTS, _PART_BYTES = 64, 1 << 16  # of a file of weights


class Reference:
    """Of each pair the log-probabilities of the chosen and of the rejected answer.

    Args:
        path: of the file that keeps them; one with another fingerprint, or damaged, is not read.
        fingerprint: of all that decides them but the pairs.
        files: digests of the model's files; those of earlier versions have none to compare with.

    Attributes:
        covers: a name of the chunks whose pairs are all known; empty where that is not known.
        is_of_another: whether the file is of another model.
    """

    def __init__(self, path: Path, fingerprint: str, files: Sequence[str] = ()) -> None:
        self._path, self._fingerprint, self._files = path, fingerprint, list(files)
        self._known: dict[bytes, tuple[float, float]] = {}
        self.covers, self.is_of_another = "", False
        try:
            with np.load(io.BytesIO(read_bytes(path)), allow_pickle=False) as found:
                told = found["files"].tolist() if "files" in found else self._files
                self.is_of_another = (found["fingerprint"].item(), told) != (
                    fingerprint, self._files,
                )  # fmt: skip
                if not self.is_of_another:
                    self.covers = str(found["covers"].item())
                    keys = found["keys"].astype(np.uint8).reshape(-1, KEY_BYTES)
                    values = found["log_probs"].astype(np.float32).reshape(-1, 2)
                    if not np.isfinite(values).all():
                        raise ValueError("a log-probability is no number")
                    self._known = {
                        key.tobytes(): (a, b)
                        for key, (a, b) in zip(keys, values.tolist(), strict=True)
                    }
        except Exception:  # whatever is wrong with a file that is none, or damaged: it is not read
            self._known, self.covers = {}, ""

    def __len__(self) -> int:
        return len(self._known)

    def has(self, chunk: Chunk) -> bool:
        """Whether all pairs of a chunk are known."""
        return all(key in self._known for key in keys_of(chunk))

    def of(self, chunk: Chunk) -> Floats:
        """Of the pairs of a chunk, [2, pairs].

        Raises:
            TwinstreamError: a pair is unknown.
        """
        keys = keys_of(chunk)
        if missing := sum(key not in self._known for key in keys):
            raise TwinstreamError(
                f"the reference in {self._path} does not know {missing} of the {len(keys)} pairs "
                "of a chunk: the data or that file has changed since the run began; remove the "
                "file, and it is computed again"
            )
        found = np.array([self._known[key] for key in keys], np.float32)
        return np.ascontiguousarray(found.reshape(-1, 2).T)

    def add(self, chunk: Chunk, log_probs: Floats) -> None:
        """Take those of a chunk's pairs, [2 P]; a pair that is known stays as it is."""
        pairs = log_probs.reshape(-1, 2).tolist()
        for key, (chosen, rejected) in zip(keys_of(chunk), pairs, strict=False):
            self._known.setdefault(key, (chosen, rejected))

    def keep(self) -> None:
        """
        Raises:
            WeightsError: the file cannot be written.
        """
        content = io.BytesIO()
        np.savez(
            content,
            fingerprint=np.array(self._fingerprint),
            files=np.array(self._files, np.str_),
            covers=np.array(self.covers),
            keys=np.frombuffer(b"".join(self._known), np.uint8).reshape(-1, KEY_BYTES),
            log_probs=np.array(list(self._known.values()), np.float32).reshape(-1, 2),
        )
        write_file(self._path, content.getvalue())


def reference_of(prepared: Prepared) -> Reference:
    """What is known of a run's reference already.

    Raises:
        TwinstreamError: the model's files cannot be read.
    """
    model = prepared.model
    files = [] if model.folder is None else sorted(model.folder.glob("*.safetensors"))
    try:
        digests = digests_of(files)
    except OSError as error:
        raise TwinstreamError(f"cannot read {model.folder}: {reason_of(error)}") from None
    path = RunFiles(prepared.options.output).reference
    return Reference(path, fingerprint_of(prepared), digests)


def fingerprint_of(prepared: Prepared) -> str:
    """Of the model before training, and of how its forward is computed.

    Of each file of weights it has the size and some of the bytes, from all over it.
    """
    model, recipe = prepared.model, prepared.recipe
    files: object = prepared.options.seed
    if model.folder is not None:
        paths = sorted(model.folder.glob("*.safetensors"))
        files = [(path.name, path.stat().st_size, _some_bytes_hash(path)) for path in paths]
    kept = {"base", "kernels", "max_row_slice"}
    decides = (
        _FORMAT, model.spec.ref().content_hash, files, recipe.model_dump(mode="json", include=kept),
    )  # fmt: skip
    return blake2b(json.dumps(decides).encode(), digest_size=KEY_BYTES).hexdigest()


def _some_bytes_hash(path: Path) -> str:
    digest, size = blake2b(digest_size=KEY_BYTES), path.stat().st_size
    with open_file(path) as file:
        for part in range(_PARTS):
            file.seek(part * max(0, size - _PART_BYTES) // (_PARTS - 1))
            digest.update(file.read(_PART_BYTES))
    return digest.hexdigest()


class ReferencePasses:
    """Has ranks at rest compute what is unknown of a run's reference; what is known is kept."""

    def __init__(self, reference: Reference, plan: Plan, data: RunData) -> None:
        self._reference, self._plan = reference, plan
        self._empty = data.empty_chunk(plan.shape(data))
        self._saved_s = monotonic()

    def compute(self, chunks: Iterable[Chunk], server: TrainerServer) -> None:
        """Computes what is unknown of these chunks, with the weights that the ranks have.

        Raises:
            TwinstreamError: a rank does not answer, one is no number, or it is stopped.
        """
        reference, plan = self._reference, self._plan
        of_pass_s = plan.step_s / plan.workload.rounds_per_step  # less than that
        at_a_time = max(1, min(_MOST_PASSES, int(_ASKED_S / of_pass_s)))
        unknown = (chunk for chunk in chunks if not reference.has(chunk))
        passes = passes_of(unknown, plan, self._empty)
        try:
            while asked := list(islice(passes, at_a_time)):
                for chunk, log_probs in self._computed(asked, server):
                    if not np.isfinite(log_probs).all():
                        raise TwinstreamError(
                            "a log-probability of the reference, which is the model before "
                            "training, is no number: look at its weights, and at the pairs"
                        )
                    reference.add(chunk, log_probs)
                if monotonic() - self._saved_s > _SAVED_EVERY_S:
                    reference.keep()
                    self._saved_s = monotonic()
        finally:
            reference.keep()

    def _computed(
        self, passes: Sequence[StepData], server: TrainerServer
    ) -> Iterator[tuple[Chunk, Floats]]:
        """Each chunk with what it has for the reference."""
        plan, each = self._plan, self._plan.workload.chunks_per_round
        shares = server.evaluate([
            tuple(batch_of(one, replica, each, plan, zero_reference) for one in passes)
            for replica in range(plan.num_replicas)
        ])  # fmt: skip
        chunks = (chunk for one in passes for chunk in one.chunks)
        return zip(chunks, log_probs_of(shares), strict=True)


def zero_reference(chunk: Chunk) -> Floats:
    """In place of a reference, where the loss is not looked at."""
    return np.zeros((2, chunk.num_pairs), np.float32)
