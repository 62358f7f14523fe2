"""Two ranks against float64 mathematics of the joined batch, the meter, and DTensors.

What a collective costs, wrapped models and failing ranks are in test_data_parallel; here the
expected values come from the oracle.
"""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from conftest import TOLERANCES, relative_error
from inputs import outputs, replace
from process_groups import run_ranks

from dspark_ext import (
    AcceptanceMeter,
    DSparkForwardOutput,
    ce_and_l1,
    compute_dspark_loss,
    l1_distance,
    loss_denominators,
    token_log_prob,
)

USUAL = {
    "loss_decay_gamma": 4.0,
    "ce_loss_alpha": 0.3,
    "l1_loss_alpha": 0.7,
    "confidence_head_alpha": 0.5,
}
K, V = 4, 33
f32 = torch.float32
# Anchors and the share of supervised positions, per rank.
SPLITS = {
    "even": ((3, 0.7), (3, 0.7)),
    "one_and_many": ((1, 0.3), (25, 1.0)),
    "nothing_supervised": ((3, 0.7), (2, 0.0)),
    "no_anchors": ((0, 0.0), (4, 0.7)),
    "nothing_anywhere": ((2, 0.0), (3, 0.0)),
}


def batch(split: str, rank: int) -> DSparkForwardOutput:
    anchors, keep = SPLITS[split][rank]
    return outputs(100 + rank, (1, anchors, K, V), keep=keep)


def joined(split: str) -> DSparkForwardOutput:
    parts = [batch(split, rank) for rank in range(2)]
    return DSparkForwardOutput(
        **{n: torch.cat([getattr(p, n).detach() for p in parts], 1) for n in vars(parts[0])}
    )


def step(made: DSparkForwardOutput, **keywords: Any) -> dict[str, Any]:
    loss, terms = compute_dspark_loss(outputs=made, return_terms=True, **USUAL, **keywords)
    if loss.requires_grad:  # the tests find the missing gradient, and the other ranks go on
        loss.backward()
    return {
        "loss": loss.detach(),
        "terms": terms,
        "draft": made.draft_logits.grad,
        "confidence": made.confidence_pred.grad,
    }


def _every_step(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    alone = [dist.new_group([other]) for other in range(world_size)][rank]
    found = {}
    for split in SPLITS:
        for impl in ("kernel", "torch"):
            found[f"{split} {impl} mean"] = step(batch(split, rank), impl=impl)
            found[f"{split} {impl} sum"] = step(batch(split, rank), impl=impl, grad_reduction="sum")
            found[f"{split} {impl} alone"] = step(
                batch(split, rank), impl=impl, process_group=alone
            )
            made = batch(split, rank)
            window = loss_denominators(made.eval_mask, USUAL["loss_decay_gamma"])
            found[f"{split} {impl} window"] = step(made, impl=impl, denominators=window)
        meter = AcceptanceMeter(block_size=K)
        meter.update(found[f"{split} kernel mean"]["terms"])
        meter.all_reduce()
        found[f"{split} meter"] = meter.compute()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(_every_step, 2)


@pytest.mark.parametrize("impl", ["kernel", "torch"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "window"])
@pytest.mark.parametrize("split", SPLITS)
def test_two_ranks_have_the_gradient_of_the_joined_batch(split, reduction, impl, ranks):
    whole = joined(split)
    expected = oracle.objective(whole, **USUAL)
    # DDP and FSDP average what the factor R = 2 has doubled; a sum needs no factor.
    combine = 1.0 if reduction == "sum" else 0.5
    found = [rank[f"{split} {impl} {reduction}"] for rank in ranks]
    tolerance = TOLERANCES[f32]
    for name, reference, bound in (
        ("draft", expected.draft_gradient, tolerance.gradient),
        ("confidence", expected.confidence_gradient, 2 * tolerance.l1),
    ):
        assert all(part[name] is not None for part in found), f"{name} has no gradient"
        gradient = torch.cat([part[name] for part in found], 1) * combine
        assert relative_error(gradient, reference) <= bound, name
    total = sum(float(part["loss"]) for part in found) * combine
    assert total == pytest.approx(expected.loss, rel=tolerance.sums, abs=tolerance.sums)


@pytest.mark.parametrize("impl", ["kernel", "torch"])
@pytest.mark.parametrize("split", SPLITS)
def test_a_rank_in_a_group_of_its_own_has_its_own_gradient(split, impl, ranks):
    for number, rank in enumerate(ranks):
        made = batch(split, number)
        expected = oracle.objective(made, **USUAL)
        found = rank[f"{split} {impl} alone"]
        assert found["draft"] is not None, "the draft has no gradient"
        error = relative_error(found["draft"], expected.draft_gradient)
        assert error <= TOLERANCES[f32].gradient
        assert float(found["loss"]) == pytest.approx(expected.loss, rel=5e-6, abs=5e-6)


@pytest.mark.parametrize("split", SPLITS)
def test_returned_terms_speak_of_their_rank_whatever_the_group(split, ranks):
    for number, rank in enumerate(ranks):
        expected = oracle.objective(batch(split, number), **USUAL).terms
        for name, term in rank[f"{split} kernel mean"]["terms"].items():
            wanted = torch.as_tensor(expected[name], dtype=torch.float64)
            assert torch.allclose(term.double(), wanted, rtol=5e-6, atol=5e-6), name


@pytest.mark.parametrize("split", SPLITS)
def test_the_meter_divides_global_sums_by_global_sums(split, ranks):
    terms = oracle.objective(joined(split), **USUAL).terms
    numerator = terms["accept_rate_per_pos_num"]
    denominator = terms["accept_rate_per_pos_den"]
    expected = {}
    if denominator.any():
        expected["accept_rate"] = float(numerator.sum() / denominator.sum())
        expected["tau"] = terms["tau_num"] / terms["tau_den"]
        expected["confidence_bias"] = terms["confidence_bias_num"] / terms["confidence_diag_den"]
        for name in ("loss", "ce_loss", "l1_loss", "confidence_loss"):
            expected[name] = terms[name]
        for k in range(K):
            if denominator[k]:
                expected[f"accept_rate@{k}"] = float(numerator[k] / denominator[k])
    for rank in ranks:
        found = rank[f"{split} meter"]
        assert bool(found) == bool(expected)
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


# --- DTensors ------------------------------------------------------------------------------------


@pytest.fixture
def single_process_group(tmp_path):
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_dtensors_that_are_not_sharded_over_the_vocabulary_are_refused(single_process_group, impl):
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    made = outputs(1, (2, 3, K, V))
    ids = made.target_ids
    for placement in (Replicate(), Shard(0), Shard(2), Partial()):
        draft, target = (
            DTensor.from_local(x.detach(), mesh, [placement])
            for x in (made.draft_logits, made.aligned_target_logits)
        )
        message = r"draft_logits.*DTensor.*to_local\(\)"
        with pytest.raises(TypeError, match=message):
            sharded = replace(made, draft_logits=draft, aligned_target_logits=target)
            compute_dspark_loss(outputs=sharded, impl=impl, **USUAL)
        with pytest.raises(TypeError, match=message):
            ce_and_l1(draft, target, ids, impl=impl)
        with pytest.raises(TypeError, match=message):
            l1_distance(draft, target, impl=impl)
        with pytest.raises(TypeError, match=message.replace("draft_logits", "logits")):
            token_log_prob(draft, ids, impl=impl)


@pytest.mark.parametrize("name", ["target_ids", "eval_mask", "confidence_pred"])
def test_dtensors_beside_the_logits_are_refused(name, single_process_group):
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    made = outputs(1, (2, 3, K, V))
    local = getattr(made, name).detach()
    wrapped = DTensor.from_local(local, init_device_mesh("cpu", (1,)), [Replicate()])
    with pytest.raises(TypeError, match=rf"{name}.*DTensor.*to_local\(\)"):
        compute_dspark_loss(outputs=replace(made, **{name: wrapped}), **USUAL)


def test_a_mix_of_a_dtensor_and_a_plain_tensor_is_refused(single_process_group):
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    made = outputs(1, (2, 3, K, V))
    draft = DTensor.from_local(
        made.draft_logits.detach(), init_device_mesh("cpu", (1,)), [Shard(-1)]
    )
    with pytest.raises(TypeError, match="draft_logits.*aligned_target_logits"):
        compute_dspark_loss(outputs=replace(made, draft_logits=draft), **USUAL)
