"""The loss in PyTorch Lightning: ``python examples/lightning_module.py``.

A LightningModule with ``AcceptanceMetric``, which Lightning moves, and torchmetrics adds up over
the ranks, as any other metric.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from typing import Any, Optional

import lightning
import torch
from synthetic import BLOCK_SIZE, SETTINGS, Windows, make_drafter
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dspark_ext import DSparkLoss
from dspark_ext.demo.drafter import Batch
from dspark_ext.metrics import AcceptanceMetric


class LitDrafter(lightning.LightningModule):
    """A drafter in training."""

    def __init__(self, drafter: nn.Module) -> None:
        super().__init__()
        self.drafter = drafter
        self.loss_fn = DSparkLoss(**SETTINGS)
        self.train_acceptance = AcceptanceMetric(BLOCK_SIZE)
        self.val_acceptance = AcceptanceMetric(BLOCK_SIZE)

    def training_step(self, items: dict[str, Tensor], index: int) -> Tensor:
        loss, terms = self.loss_fn(self.drafter(Batch(**items)), return_terms=True)
        self.train_acceptance.update(terms)
        return loss

    def on_train_epoch_end(self) -> None:
        self._log("train", self.train_acceptance)

    def validation_step(self, items: dict[str, Tensor], index: int) -> None:
        outputs = self.drafter(Batch(**items))
        _, terms = self.loss_fn(outputs, return_terms=True)
        self.val_acceptance.update(terms, outputs=outputs)

    def on_validation_epoch_end(self) -> None:
        self._log("val", self.val_acceptance)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.drafter.parameters(), lr=4e-3)

    def _log(self, stage: str, acceptance: AcceptanceMetric) -> None:
        """Logs the epoch; a metric's `compute` asks every rank, and every rank gets here."""
        self.log_dict({f"{stage}/{name}": value for name, value in acceptance.compute().items()})
        acceptance.reset()


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Trains for some epochs of 32 steps, with a validation after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=-1, help="(default: all of an epoch)")
    args = parser.parse_args(arguments)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    settings: dict[str, Any] = dict(logger=False, enable_checkpointing=False)
    trainer = lightning.Trainer(
        max_epochs=args.epochs,
        max_steps=args.steps,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Lines()],
        **settings,
    )
    trainer.fit(
        LitDrafter(make_drafter()),
        DataLoader(Windows(256), batch_size=8, shuffle=True),
        DataLoader(Windows(32, first=1), batch_size=8),
    )


class Lines(lightning.Callback):
    """Prints a line for each epoch."""

    def on_train_epoch_end(
        self, trainer: lightning.Trainer, module: lightning.LightningModule
    ) -> None:
        logged = trainer.callback_metrics
        print(
            f"epoch {trainer.current_epoch}  held out: loss {logged['val/loss']:.3f}  "
            f"accept rate {logged['val/accept_rate']:.3f}  tau {logged['val/tau']:.2f}  "
            f"calibration error {logged['val/confidence_calibration_error']:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
