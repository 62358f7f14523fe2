"""The meter as a ``torchmetrics.Metric``; needs torchmetrics, which the extra ``metrics`` brings.

Reached as ``dspark_ext.metrics.AcceptanceMetric``; nothing else of the package imports this.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Optional, Union

import torch
from torch import Tensor

from dspark_ext.metrics import (
    Reliability,
    number_of_sums,
    quantities,
    reliability_of,
    step_sums,
)

try:
    import torchmetrics
except ImportError as error:
    raise ImportError(
        "AcceptanceMetric needs torchmetrics: pip install 'dspark_ext[metrics]'"
    ) from error

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class AcceptanceMetric(torchmetrics.Metric):
    """:class:`dspark_ext.AcceptanceMeter` for trainers that log torchmetrics, Lightning's above
    all.

    The same sums, in one state that torchmetrics adds up over the ranks by itself, and the same
    quantities from :meth:`compute`, divided once::

        self.acceptance = AcceptanceMetric(block_size=7)  # in __init__

        loss, terms = self.loss_fn(self.drafter(batch), return_terms=True)
        self.acceptance.update(terms)  # in training_step

        self.log_dict(self.acceptance.compute())  # at the epoch's end
        self.acceptance.reset()

    Args:
        block_size: K of the terms.
        keywords: those of ``torchmetrics.Metric``; ``process_group`` is the data-parallel group.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    sums: Tensor

    def __init__(self, block_size: int, **keywords: Any) -> None:
        super().__init__(**keywords)
        if not isinstance(block_size, int):
            raise TypeError(f"block_size is a {type(block_size).__name__}; expected an int")
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; expected at least 1")
        self.block_size = block_size
        zeros = torch.zeros(number_of_sums(block_size), dtype=torch.float64)
        self.add_state("sums", default=zeros, dist_reduce_fx="sum")

    def update(
        self,
        terms: dict[str, Tensor],
        outputs: Any = None,
        accept_rate: Optional[Tensor] = None,
    ) -> None:
        """Adds one step's terms, as :meth:`dspark_ext.AcceptanceMeter.update` does."""
        step = step_sums(self.block_size, terms, outputs, accept_rate)
        self.sums = self.sums + step.to(self.sums.device)

    def compute(self) -> dict[str, Tensor]:
        """The quantities of :meth:`dspark_ext.AcceptanceMeter.compute`, of all ranks together,
        each as a 0-dim float32 tensor on the metric's device. Those without a position are left
        out, on every rank alike."""
        values = quantities(self.block_size, self.sums.tolist())
        return {
            name: torch.tensor(value, dtype=torch.float32, device=self.sums.device)
            for name, value in values.items()
        }

    def reliability(self) -> Optional[Reliability]:
        """As :meth:`dspark_ext.AcceptanceMeter.reliability`; of this rank, unless called within
        ``with metric.sync_context():`` on every rank."""
        return reliability_of(self.block_size, self.sums.tolist())

    def plot(self, path: Union[str, os.PathLike[str], None] = None) -> Figure:
        """As :meth:`dspark_ext.AcceptanceMeter.plot`, of the one window there is: a metric keeps
        no earlier ones. Of this rank, unless called within ``with metric.sync_context():``."""
        from dspark_ext.acceptance_plot import draw

        values = self.sums.tolist()
        return draw([quantities(self.block_size, values)], self.reliability(), path)
