"""A trainer's step with and without the patch: what differs, and which of our ops ran."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_steps import Step

import dspark_ext.integrations
from dspark_ext import compute_dspark_loss


class OpsUsed(TorchDispatchMode):
    """The names of this package's custom ops that run inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "dspark_ext":
            self.names.add(func._opname)
        return func(*args, **(kwargs or {}))


@dataclasses.dataclass(frozen=True)
class Difference:
    """Largest relative differences, each over the larger of the value and 1e-3 of its kind.

    Attributes:
        loss: of the loss.
        values: of any other reported tensor.
        gradient: of any parameter's gradient, in the L2 norm.
        ops: this package's ops that ran with the patch.
    """

    loss: float
    values: float
    gradient: float
    ops: frozenset[str]


def compare(step: Step) -> Difference:
    """Runs the step without and with the patch on the same inputs."""
    with OpsUsed() as before:
        values, gradients = step.run()
    assert before.names == set(), "the trainer ran this package's ops without the patch"
    with dspark_ext.integrations.patch(step.trainer), OpsUsed() as ops:
        patched_values, patched_gradients = step.run()
    with OpsUsed() as after:
        again, _ = step.run()
    assert after.names == set(), "the trainer runs this package's ops after undo()"
    assert all(bool((again[name] == values[name]).all()) for name in values)
    assert values.keys() <= patched_values.keys()
    assert gradients.keys() == patched_gradients.keys() and len(gradients) > 10
    for name, value in values.items():
        assert patched_values[name].shape == value.shape, name
    return Difference(
        loss=relative(patched_values["loss"], values["loss"]),
        values=max(relative(patched_values[name], values[name]) for name in values),
        gradient=max(relative(patched_gradients[name], gradients[name]) for name in gradients),
        ops=frozenset(ops.names),
    )


def judge(step: Step) -> tuple[float, float]:
    """Relative errors of the draft logits' gradient without and with the patch, of a NeMo
    AutoModel step, against float64 arithmetic on the same logits."""
    kept: dict[str, Any] = {}

    def keep(module: Any, arguments: Any, output: Any) -> None:
        output.draft_logits.retain_grad()
        kept["outputs"] = output

    hook = step.module.draft_model.register_forward_hook(keep)
    gradients = []
    for patched in (False, True):
        handle = dspark_ext.integrations.patch(step.trainer) if patched else None
        step.run()
        gradients.append(kept["outputs"].draft_logits.grad)
        if handle is not None:
            handle.undo()
    hook.remove()
    outputs = kept["outputs"]
    exact = dataclasses.replace(
        outputs,
        draft_logits=outputs.draft_logits.detach().double().requires_grad_(),
        aligned_target_logits=outputs.aligned_target_logits.detach().double(),
        confidence_pred=outputs.confidence_pred.detach().double(),
    )
    compute_dspark_loss(
        outputs=exact,
        loss_decay_gamma=step.module.loss_decay_gamma,
        ce_loss_alpha=step.module.ce_loss_alpha,
        l1_loss_alpha=step.module.l1_loss_alpha,
        confidence_head_alpha=step.module.confidence_head_alpha,
    ).backward()
    expected = exact.draft_logits.grad
    without, patched_error = (relative(gradient, expected) for gradient in gradients)
    return without, patched_error


def relative(actual: Tensor, expected: Tensor) -> float:
    """L2 norm of the difference over that of the expected, or over 1e-3 where that is less."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-3))
