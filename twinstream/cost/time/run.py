"""The time of a whole run, and what it is charged."""

from typing import Self

from twinstream.cost.bill import Bill, Prices, bill_of
from twinstream.cost.time.batch import BatchTime, Setting, batch_time
from twinstream.cost.time.plan import check_fit
from twinstream.schedule.node import Node


class TimeCost(Node):
    """All figures of a run: what `cost time` tells.

    Fields:
        num_chips: chips of the whole layout.
        num_tokens, num_batches: of the run, whole batches.
        flop_total: 6 a weight that a token meets and token.
        batch: one batch.
        bill: days and money.
    """

    setting: Setting
    num_chips: int
    num_params: int
    num_params_per_token: int
    num_batches: int
    num_tokens: int
    flop_total: int
    batch: BatchTime
    bill: Bill

    @classmethod
    def of(cls, setting: Setting, prices: Prices) -> Self:
        """The time of a run.

        Raises:
            CostError: something does not come apart evenly.
        """
        stack, cut = setting.stack, setting.cut
        check_fit(stack, cut, setting.layout)
        num_batches = cut.num_batches(stack)
        num_tokens = num_batches * cut.batch_tokens
        num_chips = setting.layout.num_chips(stack)
        batch = batch_time(setting)
        num_gpus = num_chips * setting.chip.num_gpus
        return cls(
            setting=setting,
            num_chips=num_chips,
            num_params=stack.num_params,
            num_params_per_token=stack.num_params_per_token,
            num_batches=num_batches,
            num_tokens=num_tokens,
            flop_total=6 * stack.num_params_per_token * num_tokens,
            batch=batch,
            bill=bill_of(batch.batch_s * num_batches, num_gpus, prices),
        )
