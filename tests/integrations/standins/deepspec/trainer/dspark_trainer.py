from __future__ import annotations

from typing import Any

from torch import Tensor

from deepspec.modeling.dspark.loss import compute_dspark_loss


class DSparkTrainer:
    """The step of a trainer, around a drafter's outputs that are there already."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def run_batch(self, outputs: Any) -> Tensor:
        return compute_dspark_loss(outputs=outputs, **self.settings)
