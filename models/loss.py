"""The losses that a step minimises. Each is a class, and an entry of `LOSSES` by its name.

A loss says which kernels compute it, what they cost, what they are fed and make beside a chunk's
ids and labels, and which documents have to lie in one chunk.
"""

from typing import Annotated, ClassVar

from pydantic import Field, ValidationError

from twinstream.schedule.cost import Work
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.node import Node
from twinstream.schedule.ops import Attribute
from twinstream.schedule.workload import Packing, Workload


class LossOptionsError(TwinstreamError):
    """Options of a loss that cannot be read."""


class Loss(Node):
    """A mean over the labels that count, one by one, where a class does not say otherwise.

    Attributes:
        name: what documents and `--loss` call it.
        kernel, evaluation_kernel: of a head with gradients, and of one without.
        parts_kernel: of what parts of a head tell of their logits; None where none computes it so.
        passes: over the rows of a head with gradients; the first of two is that of an evaluation.
        sides: documents of a row of data, which have to lie side by side in one chunk.
        has_reference: it compares with log-probabilities by the model before training.
        has_perplexity: its exponential is one.
        given_rate, adapter_rate: usual learning rates, of weights that are given and of adapters.
        fresh_rate: of random weights.
        bytes_per_token: that a module's head takes beside its passes over the rows.
    """

    name: ClassVar[str] = ""
    kernel: ClassVar[str]
    evaluation_kernel: ClassVar[str]
    parts_kernel: ClassVar[str | None] = None
    passes: ClassVar[int] = 1
    sides: ClassVar[int] = 1
    has_reference: ClassVar[bool] = False
    has_perplexity: ClassVar[bool] = False
    fresh_rate: ClassVar[float] = 3e-4
    given_rate: ClassVar[float] = 2e-5
    adapter_rate: ClassVar[float] = 2e-4
    bytes_per_token: ClassVar[int] = 0

    @property
    def text(self) -> str | None:
        """For a screen; None of cross entropy."""
        return f"loss {self.name}" if self.name else None

    def fed(self, workload: Workload) -> dict[str, tuple[int, ...]]:
        """Float32 tensors that each chunk's head reads beside where its sequences start."""
        return {}

    def results(self, workload: Workload) -> dict[str, tuple[int, ...]]:
        """Float32 tensors that each chunk's head writes, which go out."""
        return {}

    def attributes(self, workload: Workload) -> dict[str, Attribute]:
        """What its kernels are told of it."""
        return {}

    def works(self, tokens: int, dtype: str) -> tuple[Work, ...]:
        """What it makes of the rows of a chunk, after a pass over them."""
        return ()

    def num_targets(self, workload: Workload) -> int:
        """What a step's mean is over, of full chunks: labels."""
        return workload.tokens_per_step

    def packing(self, seq_len: int) -> Packing | None:
        """Sequences of a chunk where nothing is said of them; None: all of one length."""
        return None if self.sides == 1 else Packing.of((seq_len,) * self.sides)

    def longest(self, seq_len: int, packing: Packing | None) -> int:
        """Tokens of the longest sequence, where `seq_len` may be of all sides of a row."""
        if self.sides == 1 or packing is None:
            return seq_len
        return min(seq_len, max(packing.expected_lengths))

    @property
    def reward_scale(self) -> float:
        """Reward of an answer that has become likelier by one unit of log-probability."""
        return 1.0


class CrossEntropy(Loss):
    """Next-token cross entropy."""

    kernel = "head_loss"
    evaluation_kernel = "head_evaluate"
    parts_kernel = "parts_loss"
    has_perplexity = True


class Dpo(Loss):
    """Direct preference optimization: of two answers, that the chosen one is likelier.

    A pair's margin is beta times how much more likely than under the reference the chosen answer
    has become, less the same of the rejected one; likelihoods are logs, summed over an answer's
    tokens. Its loss is -(1 - e) log sigmoid(margin) - e log sigmoid(-margin), where e, the label
    smoothing, is how often labels are taken to be the wrong way round. The step's is the mean over
    pairs.

    Source: Rafailov et al., Direct Preference Optimization, arXiv:2305.18290, equation 7; label
    smoothing as in Mitchell, A note on DPO with noisy preferences, 2023.
    """

    name = "dpo"
    kernel = "head_dpo"
    evaluation_kernel = "head_dpo_evaluate"
    parts_kernel = "parts_dpo"
    passes = 2
    sides = 2
    has_reference = True
    given_rate = 1e-6  # TRL's default, and ten times it
    adapter_rate = 1e-5
    bytes_per_token = 24  # of a row: losses in float32 and float64, two numbers, a scale

    beta: Annotated[float, Field(gt=0, le=1e3)] = 0.1
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0

    @property
    def text(self) -> str:
        """For a screen: its numbers."""
        smoothed = f", label smoothing {self.label_smoothing:g}" if self.label_smoothing else ""
        return f"loss of pairs (dpo), beta {self.beta:g}{smoothed}"

    def fed(self, workload: Workload) -> dict[str, tuple[int, ...]]:
        """By the reference, of the chosen and of the rejected answer; and which pairs are there."""
        return {"reference": (3, workload.most_pairs)}

    def results(self, workload: Workload) -> dict[str, tuple[int, ...]]:
        """Log-probabilities of both answers of each pair."""
        return {"log_probs": (2 * workload.most_pairs,)}

    def attributes(self, workload: Workload) -> dict[str, Attribute]:
        """What its kernel is told: beta and label smoothing."""
        return {"most_pairs": workload.most_pairs, **self.model_dump()}

    def works(self, tokens: int, dtype: str) -> tuple[Work, ...]:
        """What pairs make of the rows' losses."""
        elements, launches = 10 * tokens, 33  # each row is read and written some ten times
        return (
            Work(
                unit="cross_entropy", shape=(elements,), flops=elements, hbm_bytes=elements * 4,
                launches=launches, dtype=dtype,
            ),
        )  # fmt: skip

    def num_targets(self, workload: Workload) -> int:
        """Pairs."""
        assert workload.packing is not None, "pairs are of packed sequences"
        pairs = len(workload.packing.expected_lengths) // 2
        return pairs * workload.chunks_per_round * workload.rounds_per_step

    @property
    def reward_scale(self) -> float:
        """Reward of an answer that has become likelier by one unit of log-probability."""
        return self.beta


LOSSES: dict[str, type[Loss]] = {Dpo.name: Dpo}


def names_loss(text: str | None) -> bool:
    """Whether what `--loss` says is one of `LOSSES`, and no function of a user's."""
    return text is not None and text.split(",")[0] in LOSSES


def has_function(text: str | None) -> bool:
    """Whether what `--loss` says is a function of a user's, which is part of the model."""
    return text is not None and not names_loss(text)


def kind_of_loss(text: str | None) -> type[Loss]:
    """The class of what `--loss` says; a function of a user's takes the place of cross entropy."""
    return CrossEntropy if text is None else LOSSES.get(text.split(",")[0], CrossEntropy)


def loss_of(text: str | None) -> Loss:
    """The loss and its options in what `--loss` says, `dpo` or `dpo,beta=0.1,label_smoothing=0`.

    Raises:
        LossOptionsError: the options cannot be read.

    >>> loss_of("dpo,beta=0.3")
    Dpo(beta=0.3, label_smoothing=0.0)
    """
    kind = kind_of_loss(text)
    if text is None or not names_loss(text):
        return kind()
    pairs = [option.partition("=") for option in text.split(",")[1:]]
    names = [name.strip() for name, _, _ in pairs]
    if unknown := [name for name in names if name not in kind.model_fields]:
        usual = [f"{name}={value:g}" for name, value in kind()]
        raise LossOptionsError(
            f"--loss '{text}': {kind.name} has no '{unknown[0]}'; write it as "
            f"{','.join([kind.name, *usual])}"
        )
    if len(set(names)) < len(names):
        raise LossOptionsError(f"--loss '{text}' says an option twice")
    try:
        return kind.model_validate_strings(
            {name: value.strip() for name, (_, _, value) in zip(names, pairs, strict=True)}
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise LossOptionsError(f"--loss '{text}': {first['loc'][0]}: {first['msg']}") from None
