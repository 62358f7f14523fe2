"""What autograd sees: derivatives, graphs that are kept, memory that is overwritten."""

from __future__ import annotations

import oracle
import pytest
import torch
from conftest import TOLERANCES, relative_error
from inputs import DTYPES, name_of, normal, outputs, replace
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

from dspark_ext import ce_and_l1, compute_dspark_loss, l1_distance, token_log_prob

f32, bf16, f16, f64 = DTYPES
USUAL = {
    "loss_decay_gamma": 4.0,
    "ce_loss_alpha": 0.3,
    "l1_loss_alpha": 0.7,
    "confidence_head_alpha": 0.5,
}


def produced(seed: int = 0, dtype: torch.dtype = f32, shape=(2, 3, 4, 301), **keywords):
    """A leaf, and outputs whose draft logits are computed from it without saving them."""
    made = outputs(seed, shape, dtype, **keywords)
    leaf = made.draft_logits
    return leaf, replace(made, draft_logits=leaf * 1)


def fused(made, **keywords):
    return compute_dspark_loss(outputs=made, **{**USUAL, **keywords})


def oracle_gradient(made):
    return oracle.objective(made, **USUAL).draft_gradient


# --- Derivatives ---------------------------------------------------------------------------------


def float64_rows(seed: int = 1):
    draft = normal(seed, 2, 3, 7, scale=1.5).requires_grad_()
    ids = torch.arange(6).reshape(2, 3)
    return draft, normal(seed + 1, 2, 3, 7, scale=1.5), ids


@pytest.mark.parametrize("which", ["both", "l1", "log_prob"])
def test_gradcheck_of_rows(which, impl):
    draft, target, ids = float64_rows()
    active = torch.tensor([[True, True, False], [True, True, True]])
    functions = {
        "both": lambda x: ce_and_l1(x, target, ids, active=active, impl=impl),
        "l1": lambda x: l1_distance(x, target, active=active, impl=impl),
        "log_prob": lambda x: token_log_prob(x, ids, active=active, impl=impl),
    }
    assert gradcheck(functions[which], (draft,), eps=1e-7, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("gamma", [None, 4.0])
@pytest.mark.parametrize("inplace_grad", [False, True])
def test_gradcheck_of_the_loss(gamma, inplace_grad, impl):
    made = outputs(2, (1, 2, 3, 7), f64)

    def loss(draft):
        # With an alpha the confidence loss has a target that is, by design, not differentiated.
        return fused(
            replace(made, draft_logits=draft * 1),
            loss_decay_gamma=gamma,
            confidence_head_alpha=0.0,
            inplace_grad=inplace_grad,
            impl=impl,
        )

    assert gradcheck(loss, (made.draft_logits,), eps=1e-7, atol=1e-7, rtol=1e-6)


def test_gradcheck_with_respect_to_the_confidence(impl):
    made = outputs(3, (1, 2, 3, 7), f64)
    assert gradcheck(
        lambda z: fused(replace(made, confidence_pred=z), impl=impl),
        (made.confidence_pred,),
        eps=1e-7,
        atol=1e-7,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_rows_take_independent_upstream_gradients_of_any_layout(dtype, impl):
    draft = normal(4, 3, 5, 65).to(dtype).requires_grad_()
    target, ids = normal(5, 3, 5, 65).to(dtype), torch.arange(15).reshape(3, 5)
    ce, l1 = ce_and_l1(draft, target, ids, impl=impl)
    weights = normal(6, 5, 3).to(ce.dtype)
    layouts = {
        "expanded": (torch.ones((), dtype=ce.dtype).expand(3, 5), None),
        "transposed": (weights.t(), weights.t()),
        "only l1": (None, weights.t().contiguous()),
        "every other column": (weights.repeat(1, 2).t()[:3], weights.repeat(2, 2).t()[::2, ::2]),
    }
    x, t = draft.detach(), target
    rows = [
        [(oracle.softmax(x[i, j]), oracle.softmax(t[i, j])) for j in range(5)] for i in range(3)
    ]
    for name, (a, b) in layouts.items():
        wanted = [(v, g) for v, g in ((ce, a), (l1, b)) if g is not None]
        (gradient,) = torch.autograd.grad(
            [v for v, _ in wanted], draft, [g for _, g in wanted], retain_graph=True
        )
        for i in range(3):
            for j in range(5):
                expected = torch.zeros(65, dtype=f64)
                if a is not None:
                    label = int(ids[i, j])
                    expected += float(a[i, j]) * oracle.cross_entropy_gradient(rows[i][j][0], label)
                if b is not None:
                    expected += float(b[i, j]) * oracle.l1_gradient(*rows[i][j])
                error = relative_error(gradient[i, j], expected)
                assert error <= TOLERANCES[dtype].gradient, f"{name} {dtype} row {i},{j}: {error}"


# --- Graphs that are kept, hooks, checkpoints ----------------------------------------------------


@pytest.mark.parametrize("inplace_grad", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_a_kept_graph_gives_g_and_three_g_and_leaves_the_first_alone(dtype, inplace_grad, impl):
    leaf, made = produced(7, dtype)
    expected = oracle_gradient(made)
    loss = fused(made, inplace_grad=inplace_grad, impl=impl)
    scale = 1024.0 if dtype == f16 else 1.0
    (first,) = torch.autograd.grad(loss, leaf, torch.full((), scale, dtype=loss.dtype), True)
    before = first.clone()
    (second,) = torch.autograd.grad(loss, leaf, torch.full((), 3 * scale, dtype=loss.dtype))
    assert torch.equal(first, before)
    tolerance = TOLERANCES[dtype].gradient
    assert relative_error(first / scale, expected) <= tolerance
    assert relative_error(second / scale, 3 * expected) <= 2 * tolerance  # rounded once more


@pytest.mark.parametrize("upstream", [1.0, 0.125, -3.0, 0.0])
def test_an_upstream_scalar_multiplies_the_gradient(upstream, impl):
    leaf, made = produced(8)
    expected = oracle_gradient(made) * upstream
    (fused(made, impl=impl) * upstream).backward()
    assert relative_error(leaf.grad, expected) <= TOLERANCES[f32].gradient


def test_a_loss_scale_is_applied_before_the_fp16_gradient_is_rounded(impl):
    # Without the scale these elements lie below fp16's smallest number.
    leaf, made = produced(9, f16, (1, 1, 4, 30001), confidence=False, keep=1.0)
    alphas = {"ce_loss_alpha": 0.003, "l1_loss_alpha": 0.007}
    expected = oracle.objective(made, **{**USUAL, **alphas}).draft_gradient
    assert expected.abs().median() < 2.0**-25
    (fused(made, impl=impl, **alphas) * 2.0**22).backward()
    assert relative_error(leaf.grad.double() / 2.0**22, expected) <= TOLERANCES[f16].gradient


@pytest.mark.parametrize("inplace_grad", [False, True])
def test_saved_tensors_hooks_see_what_backward_uses(inplace_grad):
    leaf, made = produced(10)
    expected = oracle_gradient(made)
    packed = []

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = fused(made, inplace_grad=inplace_grad)
    assert tuple(leaf.shape) in packed
    loss.backward()
    assert relative_error(leaf.grad, expected) <= TOLERANCES[f32].gradient


@pytest.mark.parametrize("inplace_grad", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_loss_has_the_same_gradient(use_reentrant, inplace_grad):
    made = outputs(11)
    leaf = made.draft_logits

    def loss(draft):
        return fused(replace(made, draft_logits=draft * 1), inplace_grad=inplace_grad)

    checkpoint(loss, leaf, use_reentrant=use_reentrant).backward()
    assert relative_error(leaf.grad, oracle_gradient(made)) <= TOLERANCES[f32].gradient


def test_gradients_accumulate_over_backward_passes(impl):
    made = outputs(12)
    for _ in range(3):
        fused(made, impl=impl).backward()
    error = relative_error(made.draft_logits.grad, 3 * oracle_gradient(made))
    assert error <= TOLERANCES[f32].gradient


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "columns_of_a_wider_buffer"])
def test_the_gradient_of_strided_logits_has_their_shape_and_values(layout, impl):
    made = outputs(13, (2, 3, 4, 65))
    x = made.draft_logits.detach()
    arranged = {
        "contiguous": x.clone(),
        "transposed": x.transpose(1, 2).contiguous().transpose(1, 2),
        "columns_of_a_wider_buffer": torch.cat([x, x], -1)[..., :65],
    }[layout].requires_grad_()
    fused(replace(made, draft_logits=arranged), impl=impl).backward()
    assert arranged.grad.shape == arranged.shape and arranged.grad.dtype == arranged.dtype
    assert relative_error(arranged.grad, oracle_gradient(made)) <= TOLERANCES[f32].gradient


# --- Double backward -----------------------------------------------------------------------------


def entry_points(made):
    """Every differentiable function, reduced to a scalar of the draft logits."""
    target, ids, active = made.aligned_target_logits, made.target_ids, made.eval_mask
    return {
        "compute_dspark_loss": lambda x, impl: fused(replace(made, draft_logits=x), impl=impl),
        "ce_and_l1": lambda x, impl: sum(
            v.sum() for v in ce_and_l1(x, target, ids, active=active, impl=impl)
        ),
        "l1_distance": lambda x, impl: l1_distance(x, target, active=active, impl=impl).sum(),
        "token_log_prob": lambda x, impl: token_log_prob(x, ids, active=active, impl=impl).sum(),
    }


@pytest.mark.parametrize("dtype", [f32, f16], ids=name_of)
@pytest.mark.parametrize("name", entry_points(outputs()))
def test_a_gradient_penalty_is_refused_and_never_dropped(name, dtype, impl):
    made = outputs(14, dtype=dtype)
    value = entry_points(made)[name](made.draft_logits, impl)
    with pytest.raises(RuntimeError, match=r"double backward.*create_graph=True"):
        (gradient,) = torch.autograd.grad(value, made.draft_logits, create_graph=True)
        (value + gradient.pow(2).sum()).backward()


def test_an_in_place_gradient_refuses_double_backward_too():
    leaf, made = produced(14)
    with pytest.raises(RuntimeError, match=r"double backward.*create_graph=True"):
        torch.autograd.grad(fused(made, inplace_grad=True), leaf, create_graph=True)


# --- Who gets a gradient -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_no_grad_gives_the_same_values_and_no_graph(dtype, impl):
    made = outputs(15, dtype=dtype)
    loss, terms = fused(made, return_terms=True, impl=impl)
    with torch.no_grad():
        other, other_terms = fused(made, return_terms=True, impl=impl)
    assert loss.requires_grad and not other.requires_grad
    assert torch.equal(loss.detach(), other)
    for name, term in terms.items():
        assert torch.equal(term, other_terms[name]), name


@pytest.mark.parametrize("draft,confidence", [(True, False), (False, True), (False, False)])
def test_gradients_go_where_they_are_asked_for(draft, confidence, impl):
    made = outputs(16)
    expected = oracle.objective(made, **USUAL)
    made.draft_logits.requires_grad_(draft)
    made.confidence_pred.requires_grad_(confidence)
    loss = fused(made, impl=impl)
    assert loss.requires_grad == (draft or confidence)
    assert abs(float(loss.detach()) - expected.loss) < 1e-5
    if loss.requires_grad:
        loss.backward()
    assert (made.draft_logits.grad is not None) == draft
    assert (made.confidence_pred.grad is not None) == confidence
    if draft:
        assert relative_error(made.draft_logits.grad, expected.draft_gradient) <= 5e-6
    if confidence:
        assert relative_error(made.confidence_pred.grad, expected.confidence_gradient) <= 4e-6


@pytest.mark.parametrize("name", entry_points(outputs()))
def test_no_gradient_reaches_the_teacher(name, impl):
    made = outputs(17)
    made.aligned_target_logits.requires_grad_()
    entry_points(made)[name](made.draft_logits, impl).backward()
    assert made.draft_logits.grad is not None
    assert made.aligned_target_logits.grad is None


def test_the_confidence_target_is_detached(impl):
    made = outputs(18)
    options = dict(ce_loss_alpha=0.0, l1_loss_alpha=0.0, confidence_head_alpha=1.0)
    fused(made, impl=impl, **options).backward()
    assert made.confidence_pred.grad.any()
    assert made.draft_logits.grad is None or not made.draft_logits.grad.any()


# --- Memory that is, and is not, overwritten -----------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_by_default_no_input_changes_a_bit(dtype, impl):
    made = outputs(19, dtype=dtype)
    y = made.draft_logits * 1
    tensors = {**vars(made), "y": y}
    before = {name: t.detach().clone() for name, t in tensors.items()}
    loss = fused(replace(made, draft_logits=y), impl=impl) + (y.float() ** 2).sum()
    for moment in ("forward", "backward"):
        for name, tensor in tensors.items():
            assert torch.equal(tensor.detach(), before[name]), f"{name} after {moment}, {dtype}"
        if moment == "forward":
            loss.backward()


@pytest.mark.parametrize("dtype", [f32, bf16], ids=name_of)
def test_a_tensor_shared_with_another_term_gets_both_gradients(dtype, impl):
    made = outputs(19, dtype=dtype)
    y = made.draft_logits * 1
    (fused(replace(made, draft_logits=y), impl=impl) + (y**2).sum()).backward()
    expected = oracle_gradient(made) + 2 * made.draft_logits.detach().double()
    assert relative_error(made.draft_logits.grad, expected) <= TOLERANCES[dtype].gradient


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("upstream", [1.0, 0.5])
def test_an_in_place_gradient_is_the_gradient(dtype, upstream, impl):
    leaf, made = produced(20, dtype)
    expected = oracle_gradient(made) * upstream
    scale = 1024 if dtype == f16 else 1
    (fused(made, inplace_grad=True, impl=impl) * (upstream * scale)).backward()
    tolerance = TOLERANCES[dtype].gradient
    assert relative_error(leaf.grad / scale, expected) <= tolerance * (1 if upstream == 1 else 2)


@pytest.mark.parametrize("dtype", [f32, bf16, f64], ids=name_of)
def test_an_in_place_gradient_lies_in_the_logits_memory(dtype):
    leaf, made = produced(20, dtype)
    y = made.draft_logits
    values = y.detach().clone()
    version = y._version
    seen = []
    y.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    loss = fused(made, inplace_grad=True)
    assert y._version > version
    assert not torch.equal(y.detach(), values)
    loss.backward()
    assert seen == [y.data_ptr()]


def test_an_fp16_draft_quietly_gets_a_fresh_gradient():
    leaf, made = produced(20, f16)
    values = made.draft_logits.detach().clone()
    fused(made, inplace_grad=True).backward()
    assert torch.equal(made.draft_logits.detach(), values)


def test_a_copied_input_quietly_gets_a_fresh_gradient():
    made = outputs(20, (2, 3, 4, 65))
    leaf = made.draft_logits
    strided = (leaf * 1).transpose(-1, -2).contiguous().transpose(-1, -2)
    values = strided.detach().clone()
    assert strided.stride(-1) != 1
    fused(replace(made, draft_logits=strided), inplace_grad=True).backward()
    assert torch.equal(strided.detach(), values)
    assert relative_error(leaf.grad, oracle_gradient(made)) <= TOLERANCES[f32].gradient


@pytest.mark.parametrize("dtype", [f32, bf16], ids=name_of)
def test_autograd_raises_when_an_operation_saved_the_logits_that_were_overwritten(dtype):
    leaf, made = produced(21, dtype)
    loss = (made.draft_logits**2).sum() + fused(made, inplace_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autograd_raises_when_the_producer_saved_its_result():
    made = outputs(21)
    y = made.draft_logits.exp()
    loss = fused(replace(made, draft_logits=y), inplace_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autograd_raises_when_the_gradient_was_overwritten_before_backward():
    leaf, made = produced(21)
    loss = fused(made, inplace_grad=True)
    with torch.no_grad():
        made.draft_logits.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("view", ["itself", "view", "transposed_view"])
def test_a_leaf_that_requires_grad_is_never_overwritten(view):
    made = outputs(22)
    leaf = made.draft_logits
    draft = {
        "itself": leaf,
        "view": leaf.view(leaf.shape),
        "transposed_view": leaf.transpose(0, 1).transpose(0, 1),
    }[view]
    values = leaf.detach().clone()
    with pytest.raises(RuntimeError, match=r"inplace_grad=True.*leaf"):
        fused(replace(made, draft_logits=draft), inplace_grad=True)
    assert torch.equal(leaf.detach(), values)


@pytest.mark.parametrize("overlap", ["expanded", "sliding_window"])
def test_overlapping_logits_are_never_overwritten(overlap):
    made = outputs(22, (2, 3, 4, 65))
    leaf = made.draft_logits
    draft = {
        "expanded": (leaf[:1] * 1).expand(2, 3, 4, 65),
        "sliding_window": (leaf.flatten() * 1).as_strided((2, 3, 4, 65), (40, 30, 20, 1)),
    }[overlap]
    with pytest.raises(RuntimeError, match=r"inplace_grad=True.*share memory"):
        fused(replace(made, draft_logits=draft), inplace_grad=True)


def test_a_target_in_the_same_memory_is_never_overwritten():
    leaf, made = produced(22)
    target = made.draft_logits.detach()
    values = target.clone()
    with pytest.raises(RuntimeError, match=r"inplace_grad=True.*aligned_target_logits"):
        fused(
            replace(made, draft_logits=made.draft_logits, aligned_target_logits=target),
            inplace_grad=True,
        )
    assert torch.equal(target, values)


def test_without_a_gradient_in_place_changes_nothing():
    leaf, made = produced(23)
    values = made.draft_logits.detach().clone()
    with torch.no_grad():
        fused(made, inplace_grad=True)
    made.draft_logits = made.draft_logits.detach()
    fused(made, inplace_grad=True)
    assert torch.equal(made.draft_logits.detach(), values)


@pytest.mark.parametrize("inplace_grad", [False, True])
def test_backward_hands_over_the_gradient_without_a_copy(inplace_grad):
    """What backward returns is the memory that forward filled."""
    leaf, made = produced(24)
    kept, seen = [], []

    def pack(tensor):
        kept.append(tensor.data_ptr())
        return tensor

    made.draft_logits.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = fused(made, inplace_grad=inplace_grad)
    loss.backward()
    assert len(seen) == 1 and seen[0] in kept
