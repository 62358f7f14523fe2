"""Acceptance and loss over a log window, in one number each, and as a picture."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import torch
from torch import Tensor

from dspark_ext._validate import (
    LOGIT_DTYPES,
    MASK_DTYPES,
    attribute,
    check_mapping,
    check_same_shape,
    check_tensor,
)
from dspark_ext.distributed import data_parallel
from dspark_ext.loss import _EPSILON
from dspark_ext.reduction import ordered_sum
from dspark_ext.rowwise import l1_distance

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch.distributed import ProcessGroup

    from dspark_ext.acceptance_metric import AcceptanceMetric as AcceptanceMetric

__all__ = ["AcceptanceMeter", "AcceptanceMetric", "Reliability"]

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
_NUMERATORS = tuple(f"{name}_num" for name in _LOSSES)
_PER_POSITION = ("accept_rate_per_pos_num", "accept_rate_per_pos_den")
_SUMS = (
    *_NUMERATORS,
    "ce_loss_den",
    "l1_loss_den",
    "confidence_loss_den",
    *(numerator for numerator, _ in _RATIOS.values()),
    "tau_den",
    "confidence_diag_den",
)

# The reliability diagram: predictions in ten bins of equal width, three sums in each.
_BINS = 10
_BIN_SUMS = ("positions", "predicted", "measured")

# Closed windows that plot() can look back on: four megabytes.
_WINDOWS = 10_000


def __getattr__(name: str) -> Any:
    # Of a package that not everyone has; imported by those who name it.
    if name == "AcceptanceMetric":
        from dspark_ext.acceptance_metric import AcceptanceMetric

        return AcceptanceMetric
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclasses.dataclass(frozen=True)
class Reliability:
    """Predicted against measured acceptance, in bins of the predicted one.

    Attributes:
        predicted: the mean of ``sigmoid(confidence_pred)`` in each bin that has positions.
        measured: the mean accept rate of the same positions.
        share: the positions of each of these bins, as a share of all; adds up to 1.
    """

    predicted: list[float]
    measured: list[float]
    share: list[float]

    @property
    def expected_calibration_error(self) -> float:
        """The mean over positions of how far their bin's prediction is off."""
        bins = zip(self.predicted, self.measured, self.share)
        return sum(share * abs(predicted - measured) for predicted, measured, share in bins)


def number_of_sums(block_size: int) -> int:
    """The length of a vector of sums, :func:`step_sums`."""
    return len(_SUMS) + 2 * block_size + _BINS * len(_BIN_SUMS)


def step_sums(
    block_size: int,
    terms: dict[str, Tensor],
    outputs: Any = None,
    accept_rate: Optional[Tensor] = None,
) -> Tensor:
    """One step's sums in a float64 vector: the terms', those by position, the bins'.

    Raises:
        ValueError, TypeError: see :meth:`AcceptanceMeter.update`.
    """
    check_mapping("terms", terms, "compute_dspark_loss returns with return_terms=True")
    for name in (*_LOSSES, *_SUMS, *_PER_POSITION):
        if name in _NUMERATORS:
            continue
        if name not in terms:
            raise ValueError(
                f"terms has no {name!r}; expected those that compute_dspark_loss returns with "
                "return_terms=True"
            )
        check_tensor(f"terms[{name!r}]", terms[name], LOGIT_DTYPES)
        shape = tuple(terms[name].shape)
        if name in _PER_POSITION and shape != (block_size,):
            raise ValueError(
                f"the terms are of blocks of {shape} positions; this meter was made for "
                f"block_size={block_size}"
            )
        if name not in _PER_POSITION:
            check_same_shape(f"terms[{name!r}]", terms[name], (), "compute_dspark_loss")
    values = {name: terms[name] for name in _SUMS if name not in _NUMERATORS}
    for name, denominator in _LOSSES.items():
        values[f"{name}_num"] = terms[name] * (terms[denominator] + _EPSILON)
    scalars = torch.stack([values[name].detach().to(torch.float64) for name in _SUMS])
    per_position = [terms[name].detach().to(torch.float64) for name in _PER_POSITION]
    bins = _bin_sums(outputs, accept_rate)
    if bins is None:
        bins = scalars.new_zeros(_BINS * len(_BIN_SUMS))
    return torch.cat([scalars, *per_position, bins.to(scalars.device)])


def quantities(block_size: int, values: Sequence[float]) -> dict[str, float]:
    """What :meth:`AcceptanceMeter.compute` returns, from a vector of sums."""
    sums = dict(zip(_SUMS, values))
    accepted = values[len(_SUMS) : len(_SUMS) + block_size]
    positions = values[len(_SUMS) + block_size : len(_SUMS) + 2 * block_size]
    ratios = {"accept_rate": (sum(accepted), sum(positions))}
    for k in range(block_size):
        ratios[f"accept_rate@{k}"] = (accepted[k], positions[k])
    for name, (numerator, denominator) in _RATIOS.items():
        ratios[name] = (sums[numerator], sums[denominator])
    for name, denominator in _LOSSES.items():
        ratios[name] = (sums[f"{name}_num"], sums[denominator])
    found = {
        name: numerator / denominator
        for name, (numerator, denominator) in ratios.items()
        if denominator != 0
    }
    bins = reliability_of(block_size, values)
    if bins is not None:
        found["confidence_calibration_error"] = bins.expected_calibration_error
    return found


def reliability_of(block_size: int, values: Sequence[float]) -> Optional[Reliability]:
    """The bins of a vector of sums, or None where no position is in one."""
    bins = values[len(_SUMS) + 2 * block_size :]
    rows = [bins[i : i + len(_BIN_SUMS)] for i in range(0, len(bins), len(_BIN_SUMS))]
    rows = [row for row in rows if row[0] > 0]
    if not rows:
        return None
    total = sum(positions for positions, _, _ in rows)
    return Reliability(
        predicted=[predicted / positions for positions, predicted, _ in rows],
        measured=[measured / positions for positions, _, measured in rows],
        share=[positions / total for positions, _, _ in rows],
    )


@torch.no_grad()
def _bin_sums(outputs: Any, accept_rate: Optional[Tensor]) -> Optional[Tensor]:
    """``[_BINS * 3]``: the weights of the positions whose prediction falls into a bin, and with
    them the sums of prediction and accept rate. Nothing is read on the host."""
    if outputs is None:
        if accept_rate is not None:
            raise ValueError("accept_rate needs outputs, whose confidence_pred it is compared with")
        return None
    confidence = attribute(outputs, "confidence_pred")
    if confidence is None:
        return None
    mask = check_tensor("eval_mask", attribute(outputs, "eval_mask"), MASK_DTYPES)
    check_tensor("confidence_pred", confidence, LOGIT_DTYPES)
    check_same_shape("confidence_pred", confidence, tuple(mask.shape), "eval_mask")
    active = mask != 0
    if accept_rate is None:
        accept_rate = _measured(outputs, active)
    check_tensor("accept_rate", accept_rate, LOGIT_DTYPES)
    check_same_shape("accept_rate", accept_rate, tuple(mask.shape), "eval_mask")
    # Selected, not multiplied: inactive positions may hold NaN.
    predicted = torch.where(active, torch.sigmoid(confidence.to(torch.float64)), 0.0)
    measured = torch.where(active, accept_rate.to(torch.float64), 0.0)
    index = (predicted * _BINS).long().clamp(0, _BINS - 1)
    member = index.unsqueeze(-1) == torch.arange(_BINS, device=index.device)
    weight = mask.to(torch.float64)
    sums = torch.stack([weight, weight * predicted, weight * measured], dim=-1)
    return ordered_sum((member.unsqueeze(-1) * sums.unsqueeze(-2)).flatten(0, -3)).flatten()


def _measured(outputs: Any, active: Tensor) -> Tensor:
    """The accept rate of every position, ``clamp(1 - l1/2, 0, 1)``, from the logits."""
    draft = getattr(outputs, "draft_logits", None)
    target = getattr(outputs, "aligned_target_logits", None)
    if draft is None or target is None:
        missing = "draft_logits" if draft is None else "aligned_target_logits"
        raise ValueError(
            f"outputs has no {missing}, so that the accept rate of its positions is not known; "
            "pass accept_rate= [B, A, K], or leave outputs out"
        )
    return (1 - l1_distance(draft, target, active=active) / 2).clamp(0, 1)


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
                meter.all_reduce()  # every rank
                log(meter.compute())
                meter.reset()
        meter.plot("acceptance.png")

    Args:
        block_size: K of the terms. Known from the start, so that a rank that saw no step can
            still take part in ``all_reduce``.
        device: where the sums live; default: the device of the first terms.
    """

    def __init__(self, block_size: int, device: Optional[torch.device] = None) -> None:
        if not isinstance(block_size, int):
            raise TypeError(f"block_size is a {type(block_size).__name__}; expected an int")
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; expected at least 1")
        self.block_size = block_size
        self._device = device
        self._windows: collections.deque[Tensor] = collections.deque(maxlen=_WINDOWS)
        self._begin()

    def _begin(self) -> None:
        size = number_of_sums(self.block_size)
        self._sums = torch.zeros(size, dtype=torch.float64, device=self._device)
        self._reduced: Optional[Tensor] = None
        self._updated = False

    def reset(self) -> None:
        """Begins the next window. The one that ends is kept for :meth:`plot` alone."""
        if self._updated:
            self._windows.append(self._window())
        self._begin()

    def _window(self) -> Tensor:
        """The present window's sums: the group's after ``all_reduce()``, else this rank's."""
        return self._sums if self._reduced is None else self._reduced

    def update(
        self,
        terms: dict[str, Tensor],
        outputs: Any = None,
        accept_rate: Optional[Tensor] = None,
    ) -> None:
        """Adds one step's terms, without a host synchronisation.

        Args:
            terms: as returned by the loss.
            outputs: what the loss was given, for the reliability of the confidence head, which
                no sum of the terms tells: each position's prediction is compared with its accept
                rate. That takes one more reading of the logits, without a gradient, so it is
                for evaluations; logits that ``inplace_grad=True`` has overwritten are lost to it.
                Without ``confidence_pred`` nothing is compared.
            accept_rate: ``[B, A, K]``, the accept rates where they are known already
                (``1 - l1 / 2``), or where ``outputs`` has no logits.

        Raises:
            ValueError: a term is missing or has another shape, or the terms' block size is not
                the meter's; outputs whose accept rate is not known.
            TypeError: a term that is no tensor of real numbers.
        """
        step = step_sums(self.block_size, terms, outputs, accept_rate)
        if self._device is None:
            self._device = step.device
        self._sums = self._sums.to(self._device) + step.to(self._device)
        self._reduced = None
        self._updated = True

    def all_reduce(self, process_group: Optional[ProcessGroup] = None) -> None:
        """Sums over the group (default: the world) in one collective, which every rank must
        join; ``compute()`` then speaks of the group, until the next ``update``."""
        self._reduced = data_parallel(process_group).all_reduce_sum(self._sums)
        self._updated = True  # by the group, if not by this rank

    def compute(self) -> dict[str, float]:
        """The quantities with a denominator other than 0, as floats (one host read).

        ``accept_rate``, ``accept_rate@k`` (k from 0), ``tau``, ``confidence_abs_error``,
        ``confidence_bias``, ``confidence_cumprod_bias``, ``loss``, ``ce_loss``, ``l1_loss``,
        ``confidence_loss``, and ``confidence_calibration_error`` where ``outputs`` were given.
        """
        return quantities(self.block_size, self._window().tolist())

    def reliability(self) -> Optional[Reliability]:
        """How the confidence head's predictions compare with the accept rates (one host read);
        None unless :meth:`update` was given ``outputs`` with a ``confidence_pred``."""
        return reliability_of(self.block_size, self._window().tolist())

    def plot(self, path: Union[str, os.PathLike[str], None] = None) -> Figure:
        """Accept rate by position, tau over the windows, and the reliability of the confidence
        head: a matplotlib figure, also written to ``path`` if one is given.

        The windows are those that ``reset()`` ended and the present one. Accept rates and
        reliability are those of the last window, beside the first one's accept rates. Nothing is
        reduced over ranks here: a window is what ``all_reduce()`` made of it.

        Raises:
            ImportError: matplotlib is missing (``pip install 'dspark_ext[metrics]'``).
            ValueError: no window has a position.
        """
        from dspark_ext.acceptance_plot import draw

        windows = [*self._windows, *([self._window()] if self._updated else [])]
        values = [window.tolist() for window in windows]
        reliable = [reliability_of(self.block_size, window) for window in values]
        latest = next((bins for bins in reversed(reliable) if bins is not None), None)
        return draw([quantities(self.block_size, window) for window in values], latest, path)

    def state_dict(self) -> dict[str, Any]:
        """This rank's sums and the windows that ended, for a checkpoint."""
        return {
            "block_size": self.block_size,
            "sums": self._sums.clone(),
            "windows": torch.stack([window.cpu() for window in self._windows])
            if self._windows
            else self._sums.new_zeros((0, len(self._sums)), device="cpu"),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a checkpoint.

        Raises:
            ValueError: a checkpoint of another block size, or of something else.
            TypeError: sums that are no tensor of real numbers.
        """
        check_mapping("state", state, "state_dict() of an AcceptanceMeter returned")
        if not {"block_size", "sums", "windows"} <= set(state):
            raise ValueError(
                f"the checkpoint holds {sorted(map(str, state))}; expected what state_dict() of "
                "an AcceptanceMeter returned, block_size, sums and windows"
            )
        if state["block_size"] != self.block_size:
            raise ValueError(
                f"the checkpoint is of block_size={state['block_size']}; this meter was made for "
                f"block_size={self.block_size}"
            )
        sums = check_tensor("sums", state["sums"], LOGIT_DTYPES)
        size, origin = len(self._sums), f"block_size={self.block_size}"
        check_same_shape("sums", sums, (size,), origin)
        windows = check_tensor("windows", state["windows"], LOGIT_DTYPES)
        check_same_shape("windows", windows, (len(windows), size), origin)
        self._windows = collections.deque(
            windows.detach().to(torch.float64, copy=True).unbind(), maxlen=_WINDOWS
        )
        self._updated = True
        self._sums = sums.detach().to(dtype=torch.float64, device=self._device).clone()
        self._reduced = None
