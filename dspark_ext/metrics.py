"""Acceptance and loss over a log window, in one number each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import Tensor

from dspark_ext.distributed import data_parallel
from dspark_ext.loss import _EPSILON

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# What a term is divided by, for every quantity that is a ratio of two sums.
_LOSSES = {
    "loss": "ce_loss_den",
    "ce_loss": "ce_loss_den",
    "l1_loss": "l1_loss_den",
    "confidence_loss": "confidence_loss_den",
}
_RATIOS = {
    "tau": ("tau_num", "tau_den"),
    "confidence_abs_error": ("confidence_abs_error_num", "confidence_diag_den"),
    "confidence_bias": ("confidence_bias_num", "confidence_diag_den"),
    "confidence_cumprod_bias": ("confidence_cumprod_bias_num", "confidence_diag_den"),
}
_SUMS = (
    *(f"{name}_num" for name in _LOSSES),
    "ce_loss_den",
    "l1_loss_den",
    "confidence_loss_den",
    *(numerator for numerator, _ in _RATIOS.values()),
    "tau_den",
    "confidence_diag_den",
)


class AcceptanceMeter:
    """Accumulates the terms of :func:`dspark_ext.compute_dspark_loss` and divides once.

    Every quantity is a sum over a sum: of the steps since ``reset()``, and of a group's ranks
    after ``all_reduce()``. A mean of per-step or per-rank ratios would weigh a rank with one
    supervised position like one with a thousand. The sums are float64 and stay on the terms'
    device until ``compute()``::

        meter = AcceptanceMeter(block_size=7)
        for step, batch in enumerate(loader):
            loss, terms = loss_fn(drafter(batch), return_terms=True)
            meter.update(terms)
            if step % 50 == 49:
                meter.all_reduce()          # every rank
                log(meter.compute())
                meter.reset()

    Args:
        block_size: K of the terms. Known from the start, so that a rank that saw no step can
            still take part in ``all_reduce``.
        device: where the sums live; default: the device of the first terms.
    """

    def __init__(self, block_size: int, device: Optional[torch.device] = None) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; expected at least 1")
        self.block_size = block_size
        self._device = device
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        size = len(_SUMS) + 2 * self.block_size
        self._sums = torch.zeros(size, dtype=torch.float64, device=self._device)
        self._reduced: Optional[Tensor] = None

    def update(self, terms: dict[str, Tensor]) -> None:
        """Adds one step's terms, without a host synchronisation.

        Raises:
            ValueError: the terms' block size is not the meter's.
        """
        per_position = [terms["accept_rate_per_pos_num"], terms["accept_rate_per_pos_den"]]
        if per_position[0].shape != (self.block_size,):
            raise ValueError(
                f"the terms are of blocks of {tuple(per_position[0].shape)} positions; this meter "
                f"was made for block_size={self.block_size}"
            )
        values = {name: terms[name] for name in _SUMS if name in terms}
        for name, denominator in _LOSSES.items():
            values[f"{name}_num"] = terms[name] * (terms[denominator] + _EPSILON)
        scalars = torch.stack([values[name].detach().to(torch.float64) for name in _SUMS])
        step = torch.cat([scalars, *(part.detach().to(torch.float64) for part in per_position)])
        if self._device is None:
            self._device = step.device
        self._sums = self._sums.to(self._device) + step.to(self._device)
        self._reduced = None

    def all_reduce(self, process_group: Optional[ProcessGroup] = None) -> None:
        """Sums over the group (default: the world) in one collective, which every rank must
        join; ``compute()`` then speaks of the group, until the next ``update``."""
        self._reduced = data_parallel(process_group).all_reduce_sum(self._sums)

    def compute(self) -> dict[str, float]:
        """The quantities with a denominator other than 0, as floats (one host read).

        ``accept_rate``, ``accept_rate@k`` (k from 0), ``tau``, ``confidence_abs_error``,
        ``confidence_bias``, ``confidence_cumprod_bias``, and ``loss``, ``ce_loss``, ``l1_loss``,
        ``confidence_loss``.
        """
        values = (self._sums if self._reduced is None else self._reduced).tolist()
        sums = dict(zip(_SUMS, values))
        accepted = values[len(_SUMS) : len(_SUMS) + self.block_size]
        positions = values[len(_SUMS) + self.block_size :]
        ratios = {"accept_rate": (sum(accepted), sum(positions))}
        for k in range(self.block_size):
            ratios[f"accept_rate@{k}"] = (accepted[k], positions[k])
        for name, (numerator, denominator) in _RATIOS.items():
            ratios[name] = (sums[numerator], sums[denominator])
        for name, denominator in _LOSSES.items():
            ratios[name] = (sums[f"{name}_num"], sums[denominator])
        return {
            name: numerator / denominator
            for name, (numerator, denominator) in ratios.items()
            if denominator != 0
        }

    def state_dict(self) -> dict[str, Any]:
        """This rank's sums, for a checkpoint."""
        return {"block_size": self.block_size, "sums": self._sums.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a checkpoint.

        Raises:
            ValueError: a checkpoint of another block size.
        """
        if state["block_size"] != self.block_size:
            raise ValueError(
                f"the checkpoint is of block_size={state['block_size']}; this meter was made for "
                f"block_size={self.block_size}"
            )
        self._sums = state["sums"].to(dtype=torch.float64, device=self._device).clone()
        self._reduced = None
