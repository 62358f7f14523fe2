"""Where the trainer collects what a step logs."""

from __future__ import annotations

from typing import Any, Optional

import torch

calls: list[tuple[str, float, Optional[float], str, str]] = []


def add_metric(
    name: str, value: Any, *, den: Any = None, reduction: str = "dp_sum", tag: str = "train"
) -> None:
    """Keeps every call as ``(name, value, den, reduction, tag)``; scalars only."""
    if den is not None and reduction != "dp_sum":
        raise AssertionError("a ratio is reduced as a sum")
    numbers = []
    for number in (value, den):
        if isinstance(number, torch.Tensor):
            if number.numel() != 1:
                raise AssertionError("a metric is a scalar")
            number = float(number.detach())
        numbers.append(number)
    calls.append((name, numbers[0], numbers[1], reduction, tag))
