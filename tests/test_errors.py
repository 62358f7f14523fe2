"""Bad input: each message names what was wrong, what was expected, and what to do about it."""

from __future__ import annotations

import fractions
import math
import re
import types

import numpy
import pytest
import torch
from conftest import run_python
from inputs import normal, outputs, replace
from torch.autograd import forward_ad

import dspark_ext
from dspark_ext import (
    _C,
    DSparkLoss,
    _backend,
    ce_and_l1,
    compute_dspark_loss,
    l1_distance,
    token_log_prob,
)
from dspark_ext.reduction import ordered_sum

USUAL = {
    "loss_decay_gamma": 4.0,
    "ce_loss_alpha": 0.3,
    "l1_loss_alpha": 0.7,
    "confidence_head_alpha": 0.5,
}


def loss(made, **options):
    return compute_dspark_loss(outputs=made, **{**USUAL, **options})


def refused(error: type[Exception], *parts: str):
    """``pytest.raises`` whose message contains every part, in any order."""
    return pytest.raises(error, match="".join(f"(?=.*{re.escape(part)})" for part in parts))


# --- Shapes --------------------------------------------------------------------------------------

WRONG_SHAPES = {
    "target_ids": (2, 3, 5),
    "eval_mask": (2, 4),
    "block_keep_mask": (2, 3, 1),
    "confidence_pred": (2, 3, 4, 1),
    "aligned_target_logits": (2, 3, 1, 33),
}


@pytest.mark.parametrize("name", WRONG_SHAPES)
def test_a_shape_that_does_not_belong_is_named_with_the_one_that_does(name, impl):
    made = outputs()
    wrong = torch.zeros(WRONG_SHAPES[name], dtype=getattr(made, name).dtype)
    expected = tuple(getattr(made, name).shape)
    with refused(ValueError, name, str(WRONG_SHAPES[name]), str(expected), "draft_logits"):
        loss(replace(made, **{name: wrong}), impl=impl)


@pytest.mark.parametrize("shape", [(), (33,), (4, 33), (6, 4, 33), (1, 2, 3, 4, 33)])
def test_draft_logits_of_another_rank_are_refused(shape):
    with refused(ValueError, "draft_logits", str(shape)):
        loss(replace(outputs(), draft_logits=torch.zeros(shape)))


@pytest.mark.parametrize("columns", [31, 34])
def test_vocabularies_of_two_sizes_are_both_named(columns, impl):
    made = outputs()
    target = torch.zeros(2, 3, 4, columns)
    sizes = ("33", str(columns), "vocabulary")
    with refused(ValueError, *sizes):
        loss(replace(made, aligned_target_logits=target), impl=impl)
    with refused(ValueError, *sizes):
        ce_and_l1(made.draft_logits, target, made.target_ids, impl=impl)
    with refused(ValueError, *sizes):
        l1_distance(made.draft_logits, target, impl=impl)
    with refused(ValueError, *sizes):
        dspark_ext.loss._l1_probability_distance_chunk(
            draft_logits=made.draft_logits, target_logits=target
        )


def test_an_empty_vocabulary_is_refused(impl):
    made = replace(
        outputs(confidence=False),
        draft_logits=torch.zeros(2, 3, 4, 0),
        aligned_target_logits=torch.zeros(2, 3, 4, 0),
    )
    with refused(ValueError, "draft_logits", "(2, 3, 4, 0)", "at least one column"):
        loss(made, impl=impl)


def test_rows_check_their_ids_and_masks_too(impl):
    made = outputs()
    draft, target, ids = made.draft_logits, made.aligned_target_logits, made.target_ids
    with refused(ValueError, "target_ids", "(2, 3)", "(2, 3, 4)"):
        ce_and_l1(draft, target, ids[..., 0], impl=impl)
    with refused(ValueError, "active", "(2, 3)", "(2, 3, 4)"):
        ce_and_l1(draft, target, ids, active=made.block_keep_mask, impl=impl)
    with refused(ValueError, "active", "(2, 3)", "(2, 3, 4)"):
        l1_distance(draft, target, active=made.block_keep_mask, impl=impl)
    with refused(ValueError, "target_logits", "(2, 3, 33)", "(2, 3, 4, 33)"):
        ce_and_l1(draft, target[:, :, 0], ids, impl=impl)
    with refused(ValueError, "ids", "(2, 3)", "(2, 3, 4)"):
        token_log_prob(draft, ids[..., 0], impl=impl)


def test_rows_without_what_they_are_computed_from_are_refused(impl):
    made = outputs()
    draft, target, ids = made.draft_logits, made.aligned_target_logits, made.target_ids
    with refused(ValueError, "target_logits", "None", "token_log_prob"):
        ce_and_l1(draft, None, ids, impl=impl)
    with refused(ValueError, "target_ids", "None", "l1_distance"):
        ce_and_l1(draft, target, None, impl=impl)
    with refused(ValueError, "target_logits", "None"):
        l1_distance(draft, None, impl=impl)
    with refused(ValueError, "ids", "None"):
        token_log_prob(draft, None, impl=impl)


@pytest.mark.parametrize("name", ["draft_logits", "target_ids", "block_keep_mask"])
def test_outputs_without_an_attribute_are_refused_with_its_name(name):
    made = vars(outputs())
    with refused(AttributeError, "dict", "draft_logits", "SimpleNamespace"):
        loss(made)
    del made[name]
    with refused(AttributeError, "SimpleNamespace", name, "DSparkForwardOutput"):
        loss(types.SimpleNamespace(**made))


# --- Dtypes and kinds of tensors -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", ["draft_logits", "aligned_target_logits", "confidence_pred"])
def test_a_dtype_that_is_no_float_is_refused_with_those_that_are(name, dtype, impl):
    made = outputs(requires_grad=False)
    wrong = torch.zeros(getattr(made, name).shape).to(dtype)
    with refused(TypeError, name, str(dtype), "float32, bfloat16, float16, float64"):
        loss(replace(made, **{name: wrong}), impl=impl)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_ids_that_are_no_integers_are_refused(dtype):
    made = outputs()
    with refused(TypeError, "target_ids", str(dtype), "int64", "int32"):
        loss(replace(made, target_ids=made.target_ids.to(dtype)))
    with refused(TypeError, "ids", str(dtype), "int64"):
        token_log_prob(made.draft_logits, made.target_ids.to(dtype))


@pytest.mark.parametrize("name", ["eval_mask", "block_keep_mask"])
def test_a_complex_mask_is_refused(name):
    made = outputs()
    with refused(TypeError, name, "complex64", "bool"):
        loss(replace(made, **{name: getattr(made, name).to(torch.complex64)}))


@pytest.mark.parametrize("name", ["draft_logits", "target_ids", "aligned_target_logits"])
def test_what_is_no_tensor_is_refused(name):
    with refused(TypeError, name, "list", "torch.Tensor"):
        loss(replace(outputs(), **{name: [[1.0]]}))


def test_sparse_logits_are_refused_with_the_way_to_dense_ones():
    made = outputs(requires_grad=False)
    with refused(TypeError, "draft_logits", "sparse", "to_dense()"):
        loss(replace(made, draft_logits=made.draft_logits.to_sparse()))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_logits_are_refused_with_the_way_to_padded_ones(layout):
    parts = [torch.zeros(2, 5), torch.zeros(1, 5)]
    with refused(TypeError, "draft_logits", "nested", "to_padded_tensor"):
        l1_distance(torch.nested.nested_tensor(parts, layout=layout), torch.zeros(2, 5))


@pytest.mark.parametrize("bytes_left", [0, 4])
@pytest.mark.parametrize(
    "name",
    ["draft_logits", "target_ids", "eval_mask", "block_keep_mask", "aligned_target_logits"],
)
def test_memory_that_was_given_back_is_never_read(name, bytes_left, impl):
    made = outputs(requires_grad=False)
    gone = getattr(made, name).clone()
    gone.untyped_storage().resize_(bytes_left)
    with refused(ValueError, name, str(bytes_left), "given back"):
        loss(replace(made, **{name: gone}), impl=impl)


def test_a_view_that_reaches_past_its_storage_is_never_read(impl):
    buffer = torch.zeros(40)
    past = buffer[7:].view(3, 11)
    assert l1_distance(past, past, impl=impl).tolist() == [0.0] * 3
    buffer.untyped_storage().resize_(39 * 4)
    with refused(ValueError, "draft_logits", "byte 160", "storage of 156"):
        l1_distance(past, torch.zeros(3, 11), impl=impl)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_forward_mode_is_refused_and_never_a_silent_zero(impl):
    x, t, ids = torch.randn(2, 5), torch.randn(2, 5), torch.tensor([0, 1])
    functions = (
        lambda x: l1_distance(x, t, impl=impl),
        lambda x: token_log_prob(x, ids, impl=impl),
        lambda x: ce_and_l1(x, t, ids, impl=impl)[0],
    )
    for function in functions:
        with refused(RuntimeError, "logits", "forward-mode", "reverse mode"):
            torch.func.jvp(function, (x,), (torch.ones_like(x),))
    made = outputs(requires_grad=False)
    with forward_ad.dual_level(), refused(RuntimeError, "draft_logits", "forward-mode"):
        dual = forward_ad.make_dual(made.draft_logits, torch.ones_like(made.draft_logits))
        loss(replace(made, draft_logits=dual), impl=impl)


def test_weights_that_would_get_no_gradient_are_refused(impl):
    made = outputs()
    weights = made.eval_mask.float().requires_grad_()
    with refused(ValueError, "eval_mask", "gradient", "detach()"):
        loss(replace(made, eval_mask=weights), impl=impl)
    with torch.no_grad():
        assert torch.equal(loss(replace(made, eval_mask=weights), impl=impl), loss(made, impl=impl))


@pytest.mark.parametrize("name", ["target_ids", "eval_mask", "aligned_target_logits"])
def test_tensors_on_two_devices_are_both_named(name):
    made = outputs()
    elsewhere = getattr(made, name).to("meta")
    with refused(ValueError, name, "meta", "cpu", "one device"):
        loss(replace(made, **{name: elsewhere}))


def test_denominators_of_another_device_shape_or_kind_are_refused():
    made = outputs()
    with refused(ValueError, "denominators", "meta", "cpu"):
        loss(made, denominators=torch.zeros((), device="meta"))
    with refused(ValueError, "denominators", "(3,)", "()"):
        loss(made, denominators=torch.ones(3))
    with refused(TypeError, "denominators", "float"):
        loss(made, denominators=12.0)
    with refused(TypeError, "denominators", "int64"):
        loss(made, denominators=torch.tensor(12))


def test_a_tensor_without_memory_never_reaches_a_kernel():
    with refused(TypeError, "(3, 5)", "memory"):
        _backend.log_softmax(torch.zeros(3, 5, device="meta"), None, None)


# --- Ids -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, 33, -101, 2**31, 2**40, -(2**63)])
def test_an_id_outside_the_vocabulary_is_named_with_its_position(bad, impl):
    made = outputs(1, keep=1.0)
    made.target_ids[1, 2, 3] = bad
    parts = ("[1, 2, 3]", str(bad), "-100")
    with refused(IndexError, *parts):
        loss(made, impl=impl)
    with torch.no_grad(), refused(IndexError, *parts):
        loss(made, impl=impl)
    with refused(IndexError, *parts):
        ce_and_l1(made.draft_logits, made.aligned_target_logits, made.target_ids, impl=impl)
    with refused(IndexError, *parts):
        token_log_prob(made.draft_logits, made.target_ids, impl=impl)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16], ids=str)
def test_a_narrow_id_is_compared_by_its_value(dtype, impl):
    # -100 and the vocabulary's size, in uint8, are 156 and 44; in int8 the size is 44 too.
    V = 300
    ids = torch.tensor([100, 43, 44, 45, 127] + [156, 200] * (dtype != torch.int8))
    draft = normal(3, len(ids), V).float()
    expected = token_log_prob(draft, ids, impl=impl)
    assert (expected < 0).all()
    assert torch.equal(token_log_prob(draft, ids.to(dtype), impl=impl), expected)


def test_a_refused_id_leaves_logits_that_were_to_be_overwritten_alone():
    made = outputs(1, keep=1.0)
    made.target_ids[1, 2, 3] = 33
    draft = made.draft_logits * 1
    values = draft.detach().clone()
    with pytest.raises(IndexError):
        loss(replace(made, draft_logits=draft), inplace_grad=True)
    assert torch.equal(draft.detach(), values)


# --- Options -------------------------------------------------------------------------------------


def test_an_l1_term_without_a_target_is_refused(impl):
    made = replace(outputs(confidence=False), aligned_target_logits=None)
    with refused(ValueError, "l1_loss_alpha", "aligned_target_logits", "None"):
        loss(made, impl=impl)


def test_a_confidence_without_a_target_is_refused_whatever_its_alpha(impl):
    made = replace(outputs(), aligned_target_logits=None)
    for alpha in (0.0, 0.5):
        with refused(ValueError, "confidence_pred", "aligned_target_logits", "None"):
            loss(made, l1_loss_alpha=0.0, confidence_head_alpha=alpha, impl=impl)


@pytest.mark.parametrize("impl", ["cuda", "", "Kernel"])
def test_an_unknown_implementation_is_refused_with_the_known_ones(impl):
    made = outputs()
    with refused(ValueError, "impl", repr(impl), "'auto'", "'kernel'", "'torch'"):
        loss(made, impl=impl)
    with refused(ValueError, "impl", repr(impl), "'auto'", "'kernel'", "'torch'"):
        token_log_prob(made.draft_logits, made.target_ids, impl=impl)


def test_the_kernel_is_never_replaced_by_something_else():
    draft = torch.zeros(3, 5, device="meta")
    with refused(RuntimeError, "impl='kernel'", "meta", "impl='torch'"):
        l1_distance(draft, draft, impl="kernel")


def test_other_devices_get_the_pytorch_path_with_one_warning():
    code = """
import warnings, torch
from dspark_ext import l1_distance
draft = torch.zeros(3, 5, device="meta")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        assert l1_distance(draft, draft).shape == (3,)
    l1_distance(draft, draft, impl="torch")
print([str(w.message) for w in caught if "dspark_ext" in str(w.message)])
"""
    (warning,) = eval(run_python("-c", code))
    assert "meta" in warning and "impl='torch'" in warning


@pytest.mark.parametrize("reduction", ["avg", "none", None])
def test_an_unknown_gradient_reduction_is_refused(reduction):
    with refused(ValueError, "grad_reduction", repr(reduction), "'mean'", "'sum'"):
        loss(outputs(), grad_reduction=reduction)
    with refused(ValueError, "grad_reduction"):
        DSparkLoss(**USUAL, grad_reduction=reduction)(outputs())


@pytest.mark.parametrize("option", ["vocab_start", "vocab_size"])
def test_a_shard_of_the_vocabulary_needs_its_group(option):
    made = outputs()
    with refused(ValueError, option, "tp_group"):
        loss(made, **{option: 8})
    with refused(ValueError, option, "tp_group"):
        token_log_prob(made.draft_logits, made.target_ids, **{option: 8})


def test_a_chunk_of_no_rows_is_refused():
    made = outputs()
    with refused(ValueError, "chunk_size", "0"):
        dspark_ext.loss._compute_l1_dist_per_token(
            draft_logits=made.draft_logits,
            aligned_target_logits=made.aligned_target_logits,
            chunk_size=0,
        )


NUMBERS = ("loss_decay_gamma", "ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha")


@pytest.mark.parametrize("name", NUMBERS)
def test_a_weight_that_is_no_number_is_refused(name, impl):
    for wrong in ("0.5", [0.5], 1j, torch.tensor(0.5), torch.ones(4)):
        with refused(TypeError, name, type(wrong).__name__, "expected a number"):
            loss(outputs(), **{name: wrong}, impl=impl)
    with refused(ValueError, name, "nan", "number"):
        loss(outputs(), **{name: math.nan}, impl=impl)
    if name != "loss_decay_gamma":
        with refused(ValueError, name, "inf", "finite number"):
            loss(outputs(), **{name: math.inf}, impl=impl)
        with refused(TypeError, name, "NoneType", "expected a number"):
            loss(outputs(), **{name: None}, impl=impl)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_every_kind_are_taken(name, impl):
    made = outputs()
    expected = loss(made, **{name: 2.0}, impl=impl)
    for same in (2, numpy.float32(2), numpy.float64(2), numpy.int64(2), fractions.Fraction(2)):
        assert torch.equal(loss(made, **{name: same}, impl=impl), expected)


@pytest.mark.parametrize("gamma", [1e-320, 1e-46, 1e-39, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_gamma_however_small_leaves_the_first_position_its_weight(gamma, dtype, impl):
    made = outputs(5, dtype=dtype, keep=1.0)
    first = replace(made, eval_mask=made.eval_mask.clone())
    first.eval_mask[..., 1:] = False
    _, terms = loss(made, loss_decay_gamma=gamma, return_terms=True, impl=impl)
    _, expected = loss(first, loss_decay_gamma=None, return_terms=True, impl=impl)
    for name in ("ce_loss", "l1_loss", "confidence_loss", "ce_loss_den"):
        assert torch.equal(terms[name], expected[name]), name


def test_what_is_no_process_group_is_refused_with_the_way_to_one():
    made = outputs()
    for wrong in (2, "dp", object()):
        named = (type(wrong).__name__, "ProcessGroup", "get_group()")
        with refused(TypeError, "process_group", *named):
            loss(made, process_group=wrong)
        with refused(TypeError, "tp_group", *named):
            loss(made, tp_group=wrong)
        with refused(TypeError, "tp_group", *named):
            l1_distance(made.draft_logits, made.aligned_target_logits, tp_group=wrong)
        with refused(TypeError, "process_group", *named):
            dspark_ext.loss_denominators(made.eval_mask, 4.0, wrong)


def test_denominators_of_what_is_no_mask_are_refused():
    mask = torch.ones(2, 3, 4)
    with refused(TypeError, "eval_masks", "NoneType", "list"):
        dspark_ext.loss_denominators(None, 4.0)
    with refused(TypeError, "eval_masks[1]", "list", "torch.Tensor"):
        dspark_ext.loss_denominators([mask, [1.0]], 4.0)
    with refused(TypeError, "eval_masks[1]", "complex64", "bool"):
        dspark_ext.loss_denominators([mask, mask.to(torch.complex64)], 4.0)
    with refused(ValueError, "eval_masks[1]", "meta", "cpu", "one device"):
        dspark_ext.loss_denominators([mask, mask.to("meta")], 4.0)
    window = (m for m in (mask, mask))
    assert dspark_ext.loss_denominators(window, None) == 48


def test_a_meter_refuses_what_are_no_terms_and_no_checkpoint():
    _, terms = loss(outputs(), return_terms=True)
    meter = dspark_ext.AcceptanceMeter(block_size=4)
    meter.update(terms)
    before = meter.compute()
    with refused(TypeError, "terms", "NoneType", "return_terms=True"):
        meter.update(None)
    with refused(ValueError, "tau_den", "return_terms=True"):
        meter.update({name: value for name, value in terms.items() if name != "tau_den"})
    with refused(TypeError, "terms['tau_num']", "complex64"):
        meter.update({**terms, "tau_num": terms["tau_num"].to(torch.complex64)})
    with refused(ValueError, "terms['tau_num']", "(4,)", "()"):
        meter.update({**terms, "tau_num": torch.ones(4)})
    with refused(ValueError, "(5,)", "block_size=4"):
        meter.update({**terms, "accept_rate_per_pos_den": torch.ones(5)})
    state = meter.state_dict()
    with refused(TypeError, "state", "list", "state_dict()"):
        meter.load_state_dict([1.0])
    with refused(ValueError, "checkpoint", "sums", "state_dict()"):
        meter.load_state_dict({"block_size": 4})
    with refused(ValueError, "sums", "(3,)", "block_size=4"):
        meter.load_state_dict({**state, "sums": torch.zeros(3)})
    with refused(TypeError, "block_size", "float", "int"):
        dspark_ext.AcceptanceMeter(block_size=4.0)
    assert meter.compute() == before


def test_sums_of_every_dtype_are_sums():
    # Weight masks and accept rates of the reference's functions may be of any.
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64):
        values = torch.full((1000, 3), 2, dtype=dtype)
        assert torch.equal(ordered_sum(values), torch.full((3,), 2000, dtype=dtype))
    num, den = dspark_ext.loss._compute_local_l1_term(
        l1_dist_per_token=torch.full((2, 3, 4), 0.5),
        loss_weight_mask=torch.ones(2, 3, 4, dtype=torch.float16),
    )
    assert (num, den) == (12, 24)


def test_denominators_of_no_mask_are_refused():
    with refused(ValueError, "eval_masks"):
        dspark_ext.loss_denominators([], 4.0)
    with refused(ValueError, "eval_mask", "[B, A, K]"):
        dspark_ext.loss_denominators([torch.tensor(True)], 4.0)


def test_every_argument_is_a_keyword():
    with pytest.raises(TypeError):
        compute_dspark_loss(outputs(), 4.0, 0.3, 0.7, 0.5)


@pytest.mark.skipif(_backend.cuda_architectures() is None, reason="this build has no CUDA kernels")
def test_a_failure_of_cuda_is_named_with_its_place():
    # There is no such device, and on most machines that run this no driver either.
    named = r"cuda\w+\(.*\) failed with cudaError\w+ \(.+\) at .*runtime\.h:\d+"
    with pytest.raises(RuntimeError, match=named):
        _C.cuda_scale(0, 0, _C.DType.float32, 0, 0, 4096, 0)


# --- Layouts that are accepted -------------------------------------------------------------------


def test_a_last_dimension_that_is_not_contiguous_is_copied(impl):
    draft, target = (normal(seed, 33, 6).float() for seed in (2, 3))
    ids = torch.arange(6)
    expected = ce_and_l1(draft.t().contiguous(), target.t().contiguous(), ids, impl=impl)
    actual = ce_and_l1(draft.t(), target.t(), ids, impl=impl)
    assert all(torch.equal(x, y) for x, y in zip(actual, expected))


def test_a_broken_environment_variable_is_no_silent_default():
    code = (
        "import torch, dspark_ext\n"
        "try:\n"
        "    dspark_ext.l1_distance(torch.zeros(2, 3), torch.zeros(2, 3))\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)"
    )
    message = run_python("-c", code, level="sse9")
    assert "DSPARK_EXT_CPU_LEVEL" in message and "sse9" in message and "baseline" in message


def test_nan_is_an_answer_and_no_error(impl):
    made = outputs(4, keep=1.0)
    draft = made.draft_logits.detach().clone()
    draft[0, 0, 0] = math.nan
    assert loss(replace(made, draft_logits=draft), impl=impl).isnan()


OPS = torch.ops.dspark_ext


@pytest.mark.parametrize(
    "call",
    [
        lambda x, n: OPS.weighted_fwd(x, x[:2, :3], n.long(), None, n, n, True),
        lambda x, n: OPS.weighted_fwd(x, x, n[:1].long(), None, n, n, True),
        lambda x, n: OPS.weighted_fwd(x, x, n.long(), n[:2].bool(), n, n, True),
        lambda x, n: OPS.weighted_fwd(x, x, n.long(), None, n[:3], n, True),
        lambda x, n: OPS.weighted_inplace_(x, x, n.long(), None, n, n[:3]),
        lambda x, n: OPS.log_softmax_fwd(x, n[:1].long(), None),
        lambda x, n: OPS.l1_distance_fwd(x, x, n, n, None),
        lambda x, n: OPS.ce_and_l1_fwd(x, x[:3], n.long(), None),
        lambda x, n: OPS.ce_and_l1_bwd(n, None, x, None, n.long(), None, n, None, None),
        lambda x, n: OPS.weighted_bwd(x, n[:0]),
        lambda x, n: OPS.ordered_sum(x.half()),
    ],
)
def test_the_ops_themselves_refuse_what_does_not_belong_together(call):
    """They are not public, and still must not read where there is nothing."""
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        call(torch.randn(500, 300), torch.ones(500))
