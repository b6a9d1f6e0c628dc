"""Which experts a token goes to and how much each counts, and the gradient of a router's logits.

A choice is made once, in forward, and saved: no recompute can make another. Scores are float32; a
softmax router multiplies in the model's dtype and a sigmoid router in float32, as transformers
does. Legend: T tokens, D d_model, E experts, K of them for each token.
"""

from dataclasses import dataclass

import torch

from twinstream.executor.kernels.operand import KernelOperand
from twinstream.executor.kernels.vector.row_blocks import row_blocks
from twinstream.models.kernel_costs.scratch_sizes import router_block_width
from twinstream.models.options import Experts
from twinstream.schedule.workload import PADDING_LABEL

_TINY = 1e-20  # added to the sum that sigmoid scores are divided by, as transformers does


@dataclass(frozen=True)
class Routes:
    """A chunk's choice."""

    chosen: torch.Tensor  # int32
    weights: torch.Tensor  # float32


def routes_of(operand: KernelOperand, shape: tuple[int, int]) -> Routes:
    """Those that an operand holds, of so many tokens and experts of each: numbers, then weights."""
    chosen = operand.view(torch.int32, shape)
    return Routes(chosen, operand.view(torch.float32, shape, chosen.nbytes))


@dataclass(frozen=True)
class BalanceLoss:
    """The load-balancing loss of a round: E x sum over experts of count x score / rows^2.

    `counts` are rows that went to each expert and `scores` sums of their scores, over all layers
    and chunks of a round; a router's scores count as its softmax, whatever it chooses by. Rows of
    padding, which are never in them, are those whose label says so, as transformers leaves out
    what its attention mask does not have. `coefficient` is what a round's loss counts in the
    step's.
    """

    counts: torch.Tensor  # [E], float32, whole numbers
    scores: torch.Tensor  # [E], float32
    experts: Experts
    coefficient: float
    labels: torch.Tensor | None = None  # [T], int32; None where no rows are at hand

    def factor(self) -> torch.Tensor:
        """What counts x scores count; each row went to as many experts."""
        num_rows = (self.counts.double().sum() / self.experts.per_token).clamp(min=1.0)
        weight = self.coefficient * self.experts.count
        return (weight / num_rows / num_rows).float()

    def is_token(self, rows: slice) -> torch.Tensor:
        """[R, 1]: whether a row is no padding."""
        assert self.labels is not None
        return (self.labels[rows] != PADDING_LABEL).unsqueeze(1)


def balance_sums(
    operand: KernelOperand, experts: Experts, labels: torch.Tensor | None = None
) -> BalanceLoss:
    """Those that an operand holds: counts, then scores."""
    counts, scores = operand.view(torch.float32, (2, experts.count))
    return BalanceLoss(counts, scores, experts, experts.aux_loss, labels)


def choose(
    x_TD: torch.Tensor, router_ED: torch.Tensor, bias_E: torch.Tensor | None, experts: Experts,
    routes: Routes, balance: BalanceLoss | None = None,
) -> None:  # fmt: skip
    """Write the choice for normed rows, and add what it is to the sums of a balance loss."""
    for rows in row_blocks(x_TD.shape[0], router_block_width(x_TD.shape[1], experts)):
        logits = _logits(x_TD[rows], router_ED, experts)
        scores = _scores(logits, experts)
        chosen = _best(scores if bias_E is None else scores + bias_E, experts)
        weights = scores.gather(1, chosen)
        if experts.normalized:
            weights /= weights.sum(1, keepdim=True) + _tiny(experts)
        routes.chosen[rows].copy_(chosen)
        torch.mul(weights, experts.scale, out=routes.weights[rows])
        if balance is not None:
            is_token = balance.is_token(rows)
            each = torch.arange(experts.count, device=chosen.device)
            counted = chosen.masked_fill(~is_token, -1)
            balance.counts.add_((counted.reshape(-1, 1) == each).sum(0))
            balance.scores.add_(torch.softmax(logits, 1).masked_fill_(~is_token, 0.0).sum(0))


def logit_gradients(  # noqa: PLR0913 - what a choice was made of, and where gradients are
    x_TD: torch.Tensor, router_ED: torch.Tensor, experts: Experts, routes: Routes,
    d_weights_TK: torch.Tensor, out_TE: torch.Tensor, balance: BalanceLoss | None = None,
) -> None:  # fmt: skip
    """Write the gradients of a router's logits from those of the weights that it chose."""
    for rows in row_blocks(x_TD.shape[0], router_block_width(x_TD.shape[1], experts)):
        logits = _logits(x_TD[rows], router_ED, experts)
        scores = _scores(logits, experts)
        chosen = routes.chosen[rows].to(torch.int64)
        d_chosen = d_weights_TK[rows] * experts.scale
        if experts.normalized:
            picked = scores.gather(1, chosen)
            total = picked.sum(1, keepdim=True) + _tiny(experts)
            mean = (d_chosen * picked).sum(1, keepdim=True) / total
            d_chosen = (d_chosen - mean) / total
        d_scores = torch.zeros_like(scores).scatter_(1, chosen, d_chosen)
        if experts.scores == "sigmoid":
            d_logits = d_scores * scores * (1.0 - scores)
        else:
            d_logits = _softmax_gradient(d_scores, scores)
        if balance is not None:
            shares = torch.softmax(logits, 1)
            d_shares = (balance.counts * balance.factor()).expand_as(shares)
            d_balance = _softmax_gradient(d_shares, shares)
            d_logits = d_logits + d_balance.masked_fill_(~balance.is_token(rows), 0.0)
        out_TE[rows].copy_(d_logits)


def add_balance_loss(balance: BalanceLoss, loss: torch.Tensor) -> None:
    """Add a round's load-balancing loss to a loss of [1]."""
    loss.add_(torch.dot(balance.counts, balance.scores) * balance.factor())


def _logits(x_RD: torch.Tensor, router_ED: torch.Tensor, experts: Experts) -> torch.Tensor:
    if experts.scores == "sigmoid":
        return torch.mm(x_RD.float(), router_ED.float().t())
    return torch.mm(x_RD, router_ED.t()).float()


def _scores(logits_RE: torch.Tensor, experts: Experts) -> torch.Tensor:
    if experts.scores == "sigmoid":
        return torch.sigmoid(logits_RE)
    return torch.softmax(logits_RE, 1)


def _best(scores_RE: torch.Tensor, experts: Experts) -> torch.Tensor:
    """The numbers of the highest scores, among the best groups where not all groups count."""
    if experts.groups_per_token < experts.num_groups:
        groups = scores_RE.view(scores_RE.shape[0], experts.num_groups, -1)
        of_group = groups.topk(min(2, groups.shape[2]), dim=2).values.sum(2)
        best = of_group.topk(experts.groups_per_token, dim=1).indices
        allowed = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, best, value=True)
        scores_RE = groups.masked_fill(~allowed[:, :, None], -torch.inf).flatten(1)
    return scores_RE.topk(experts.per_token, dim=1).indices


def _softmax_gradient(d_RE: torch.Tensor, softmax_RE: torch.Tensor) -> torch.Tensor:
    return softmax_RE * (d_RE - (d_RE * softmax_RE).sum(1, keepdim=True))


def _tiny(experts: Experts) -> float:
    return _TINY if experts.scores == "sigmoid" else 0.0
