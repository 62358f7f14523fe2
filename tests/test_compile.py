"""The custom ops under torch.library's own checks, and a training step under torch.compile."""

from __future__ import annotations

import pytest
import torch
from inputs import DTYPES, labelled_rows, name_of, outputs, replace

from dspark_ext import DSparkLoss, ce_and_l1, l1_distance, token_log_prob

f32, bf16, f16, f64 = DTYPES
OPS = torch.ops.dspark_ext


def op_arguments(dtype: torch.dtype, target_dtype: torch.dtype) -> dict[str, list[tuple]]:
    """Every op with the argument combinations that its callers use."""
    rows = labelled_rows(1, 37, dtype, target_dtype)
    real = f64 if f64 in (dtype, target_dtype) else f32
    draft, target, ids = rows.draft, rows.target, rows.ids
    active = torch.tensor([True, False, True, True, True, False])
    a, b = torch.rand(6, dtype=real), torch.rand(6, dtype=real)
    known = [OPS.log_softmax_fwd(x, None, None)[0].to(real) for x in (draft, target)]
    sides = OPS.l1_distance_fwd(draft, target, *known, None)[1]

    def leaf() -> torch.Tensor:
        return draft.clone().requires_grad_()

    upstream = torch.tensor(3.0, dtype=f64 if dtype == f64 else f32)
    return {
        "log_softmax_fwd": [(leaf(), ids, active), (leaf(), ids, None), (draft, None, None, draft)],
        "l1_distance_fwd": [(draft, target, *known, active), (draft, target, *known, None)],
        "ce_and_l1_fwd": [
            (leaf(), target, ids, active),
            (leaf(), target, None, None),
            (leaf(), None, ids, None),
        ],
        "ce_and_l1_bwd": [
            (a, b, draft, target, ids, active, *known, sides),
            (a, None, draft, None, ids, None, known[0], None, None),
            (None, b, draft, target, None, active, *known, sides),
        ],
        "weighted_fwd": [
            (leaf(), target, ids, active, a, b, True),
            (leaf(), None, ids, None, a, b, True),
            (draft, target, ids, active, a, b, False),
        ],
        "weighted_inplace_": [(draft, target, ids, active, a, b), (draft, None, ids, None, a, b)],
        "ordered_sum": [
            (a.clone().requires_grad_(),),
            (torch.stack([a, b], -1),),
            (torch.empty(0, 3, dtype=real),),
        ],
        "weighted_bwd": [(draft, upstream)],
        "weighted_bwd_": [(draft, upstream)],
    }


def test_every_op_is_checked():
    names = torch._C._dispatch_get_all_op_names()
    ours = {name.split("::")[1] for name in names if name.startswith("dspark_ext::")}
    assert ours == set(op_arguments(f32, f32))


@pytest.mark.parametrize(
    "dtypes", [(f32, f32), (bf16, f32), (f16, f16), (f64, f64)], ids=lambda p: name_of(p[0])
)
@pytest.mark.parametrize("name", op_arguments(f32, f32))
def test_opcheck(name, dtypes):
    for arguments in op_arguments(*dtypes)[name]:
        torch.library.opcheck(getattr(OPS, name).default, arguments)


@pytest.mark.parametrize("name", ["ce_and_l1_fwd", "weighted_fwd"])
def test_opcheck_of_strided_logits(name):
    rows = labelled_rows(2, 37, f32)
    draft, target = (torch.cat([x, x], -1)[None, :, :37] for x in (rows.draft, rows.target))
    arguments = [draft.requires_grad_(), target, rows.ids[None], None]
    if name == "weighted_fwd":
        arguments += [torch.rand(1, 6), torch.rand(1, 6), True]
    torch.library.opcheck(getattr(OPS, name).default, tuple(arguments))


# --- A training step -----------------------------------------------------------------------------


class Step(torch.nn.Module):
    """A head on hidden states, the objective, and every other public function."""

    def __init__(self, dtype: torch.dtype, impl: str, inplace_grad: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.head = torch.nn.Linear(8, 65, dtype=dtype)
        self.impl = impl
        self.objective = DSparkLoss(
            loss_decay_gamma=4.0,
            ce_loss_alpha=0.3,
            l1_loss_alpha=0.7,
            confidence_head_alpha=0.5,
            inplace_grad=inplace_grad,
            impl=impl,
        )

    def forward(self, hidden, made):
        draft = self.head(hidden)
        target, ids, active = made.aligned_target_logits, made.target_ids, made.eval_mask
        loss, terms = self.objective(replace_draft(made, draft), return_terms=True)
        ce, l1 = ce_and_l1(draft, target, ids, active=active, impl=self.impl)
        distance = l1_distance(draft, target, active=active, impl=self.impl)
        log_prob = token_log_prob(draft, ids, active=active, impl=self.impl)
        return loss, terms, (ce * 2 + l1 + distance.square() - log_prob).sum()


class FusedStep(Step):
    """The objective alone, which may overwrite the logits."""

    def forward(self, hidden, made):
        loss, terms = self.objective(replace_draft(made, self.head(hidden)), return_terms=True)
        return loss, terms, loss.detach()


def replace_draft(made, draft):
    return type(made)(
        draft,
        made.target_ids,
        made.eval_mask,
        made.block_keep_mask,
        made.confidence_pred,
        made.aligned_target_logits,
    )


def run(step, hidden, made):
    """Every value and gradient of one forward and backward pass."""
    hidden = hidden.clone().requires_grad_()
    made = replace(made)
    module = getattr(step, "_orig_mod", step)
    module.zero_grad()
    loss, terms, rest = step(hidden, made)
    (loss + rest).backward()
    return {
        **terms,
        "loss": loss.detach(),
        "rest": rest.detach(),
        "hidden.grad": hidden.grad,
        "weight.grad": module.head.weight.grad,
        "confidence.grad": made.confidence_pred.grad,
    }


@pytest.mark.parametrize(
    "kind,dtype,impl,inplace_grad,backend",
    [
        (Step, f32, "kernel", False, "inductor"),
        (Step, bf16, "kernel", False, "aot_eager"),
        (Step, f16, "auto", False, "aot_eager"),
        (Step, f64, "kernel", False, "aot_eager"),
        (FusedStep, f32, "kernel", True, "aot_eager"),
        (Step, f32, "torch", False, "aot_eager"),
    ],
    ids=["inductor", "bf16", "fp16", "float64", "in_place", "torch"],
)
def test_a_step_compiles_without_a_break_and_gives_equal_results(
    kind, dtype, impl, inplace_grad, backend
):
    torch._dynamo.reset()
    step = kind(dtype, impl, inplace_grad)
    made = outputs(4, (2, 3, 4, 65), dtype)
    hidden = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(5)).to(dtype)
    expected = run(step, hidden, made)
    actual = run(torch.compile(step, fullgraph=True, backend=backend), hidden, made)
    assert actual.keys() == expected.keys()
    # A compiler may fuse a head's arithmetic differently; the kernels' share is the same bits.
    tolerance = {f32: 1e-5, f64: 1e-12}.get(dtype, 2e-2)
    for name, value in expected.items():
        assert torch.allclose(actual[name], value, rtol=tolerance, atol=tolerance), name


def test_another_number_of_anchors_does_not_break_the_graph():
    torch._dynamo.reset()
    step = FusedStep(f32, "kernel", False)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for A in (3, 5):
        made = outputs(6, (2, A, 4, 65))
        hidden = torch.randn(2, A, 4, 8)
        expected, actual = run(step, hidden, made), run(compiled, hidden, made)
        for name, value in expected.items():
            assert torch.allclose(actual[name], value, rtol=1e-5, atol=1e-5), f"A={A} {name}"


def test_a_compiled_evaluation_needs_no_gradient():
    torch._dynamo.reset()
    step = FusedStep(f32, "kernel", False)
    made = outputs(7, (2, 3, 4, 65), requires_grad=False)
    hidden = torch.randn(2, 3, 4, 8)
    with torch.no_grad():
        expected = step(hidden, made)[0]
        actual = torch.compile(step, fullgraph=True, backend="aot_eager")(hidden, made)[0]
    assert not actual.requires_grad
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
