"""The loss in Hugging Face's Trainer: ``python examples/huggingface_trainer.py``.

Two methods carry it. ``get_batch_samples`` hands the micro-batches of one optimizer step over
together, which is where their common denominator is known; ``compute_loss`` receives it as
``num_items_in_batch`` and passes it on. The losses of the micro-batches then add up to the joined
batch's, on any number of ranks.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, Optional, Union

import torch
import transformers
from synthetic import BLOCK_SIZE, SETTINGS, Windows, make_drafter
from torch import Tensor, nn
from torch.utils.data import default_collate

from dspark_ext import AcceptanceMeter, compute_dspark_loss, loss_denominators
from dspark_ext.demo.drafter import Batch, align


class DrafterTrainer(transformers.Trainer):
    """A Trainer of drafters; its logs have the meter's quantities beside its own."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        # The loss is that of the whole step already, not to be divided by its micro-batches.
        self.model_accepts_loss_kwargs = True
        self.meter = AcceptanceMeter(BLOCK_SIZE)

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Tensor]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Tensor]], Optional[Tensor]]:
        """The micro-batches of a step, and the denominator of their losses over all ranks."""
        window = list(itertools.islice(epoch_iterator, num_batches))
        masks = [align(Batch(**items), BLOCK_SIZE)[1] for items in window]
        gamma = SETTINGS["loss_decay_gamma"]
        return window, loss_denominators(masks, gamma).to(device) if window else None

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Optional[Tensor] = None,
    ) -> Union[Tensor, tuple[Tensor, Any]]:
        """The micro-batch's share of the step's loss; its terms go to the meter."""
        outputs = model(Batch(**inputs))
        loss, terms = compute_dspark_loss(
            outputs=outputs, return_terms=True, denominators=num_items_in_batch, **SETTINGS
        )
        self.meter.update(terms)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *arguments: Any, **keywords: Any) -> None:
        """Adds the quantities since the last log, of all ranks together."""
        if "loss" in logs:
            self.meter.all_reduce()
            logs = {**logs, **self.meter.compute()}
            self.meter.reset()
        super().log(logs, *arguments, **keywords)

    def evaluate(self, *arguments: Any, **keywords: Any) -> dict[str, float]:
        """The meter's quantities of the held-out windows; the metrics are named ``eval_*``."""
        meter = AcceptanceMeter(BLOCK_SIZE)
        self.model.eval()
        with torch.no_grad():
            for items in self.get_eval_dataloader():
                inputs = self._prepare_inputs(items)
                _, terms = compute_dspark_loss(
                    outputs=self.model(Batch(**inputs)), return_terms=True, **SETTINGS
                )
                meter.update(terms)
        self.model.train()
        meter.all_reduce()
        metrics = {f"eval_{name}": value for name, value in meter.compute().items()}
        self.log(metrics)
        return metrics


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Trains and evaluates; two micro-batches make one optimizer step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=160, help="(default: %(default)s)")
    parser.add_argument("--accumulate", type=int, default=2, help="(default: %(default)s)")
    args = parser.parse_args(arguments)

    with tempfile.TemporaryDirectory() as folder:
        trainer = DrafterTrainer(
            model=make_drafter(),
            args=transformers.TrainingArguments(
                output_dir=folder,
                max_steps=args.steps,
                per_device_train_batch_size=8 // args.accumulate,
                gradient_accumulation_steps=args.accumulate,
                learning_rate=4e-3,
                lr_scheduler_type="constant",
                logging_steps=max(1, args.steps // 8),
                save_strategy="no",
                report_to=[],
                remove_unused_columns=False,
            ),
            train_dataset=Windows(256),
            eval_dataset=Windows(32, first=1),
            data_collator=default_collate,
        )
        trainer.train()
        metrics = trainer.evaluate()
    print(f"held out: loss {metrics['eval_loss']:.3f}  tau {metrics['eval_tau']:.2f}")


if __name__ == "__main__":
    main()
