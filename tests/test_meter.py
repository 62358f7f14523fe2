"""AcceptanceMeter: sums over steps and ranks, divided once."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from inputs import OBJECTIVE, outputs, replace
from process_groups import CollectiveCounter, run_ranks
from torch import Tensor

from dspark_ext import AcceptanceMeter, DSparkForwardOutput, compute_dspark_loss

K, V = 4, 33
ACCEPTANCE = {"accept_rate", *(f"accept_rate@{k}" for k in range(K)), "tau"}
CONFIDENCE = {"confidence_abs_error", "confidence_bias", "confidence_cumprod_bias"}
LOSSES = {"loss", "ce_loss", "l1_loss", "confidence_loss"}


def step(seed: int, anchors: int, keep: float = 0.75) -> DSparkForwardOutput:
    return outputs(seed, (1, anchors, K, V), keep=keep, requires_grad=False)


def terms_of(made: DSparkForwardOutput, **changes: Any) -> dict[str, Tensor]:
    return compute_dspark_loss(outputs=made, return_terms=True, **{**OBJECTIVE, **changes})[1]


def joined(steps: list[DSparkForwardOutput]) -> DSparkForwardOutput:
    return DSparkForwardOutput(
        **{name: torch.cat([getattr(s, name) for s in steps], 1) for name in vars(steps[0])}
    )


def quantities(made: DSparkForwardOutput) -> dict[str, float]:
    """Every quantity of one batch, from the definitions."""
    terms = oracle.objective(made, **OBJECTIVE).terms
    numerator, denominator = terms["accept_rate_per_pos_num"], terms["accept_rate_per_pos_den"]
    found = {f"accept_rate@{k}": float(numerator[k] / denominator[k]) for k in range(K)}
    found["accept_rate"] = float(numerator.sum() / denominator.sum())
    found["tau"] = terms["tau_num"] / terms["tau_den"]
    for name in CONFIDENCE:
        found[name] = terms[f"{name}_num"] / terms["confidence_diag_den"]
    # The terms' losses carry 1e-6 in their denominators; a ratio of sums does not.
    den = terms["ce_loss_den"]
    found.update({name: terms[name] * (den + oracle.EPSILON) / den for name in LOSSES})
    return found


def assert_close(actual: dict[str, float], expected: dict[str, float]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


# Steps with few and with many positions: a mean of their ratios is another number.
STEPS = ((1, 1, 0.3), (2, 30, 0.9), (3, 5, 0.5))


def test_a_window_of_steps_gives_the_ratios_of_the_joined_batch():
    steps = [step(*arguments) for arguments in STEPS]
    meter = AcceptanceMeter(block_size=K)
    for made in steps:
        meter.update(terms_of(made))
    expected = quantities(joined(steps))
    assert set(expected) == ACCEPTANCE | CONFIDENCE | LOSSES
    assert_close(meter.compute(), expected)
    assert all(type(value) is float for value in meter.compute().values())
    mean_of_ratios = sum(quantities(joined([made]))["loss"] for made in steps[1:]) / 2
    assert mean_of_ratios != pytest.approx(quantities(joined(steps[1:]))["loss"], rel=1e-3)


def test_steps_without_supervision_change_nothing():
    made = step(1, 6)
    meter = AcceptanceMeter(block_size=K)
    meter.update(terms_of(made))
    before = meter.compute()
    for anchors in (0, 3):
        meter.update(terms_of(step(2, anchors, keep=0.0)))
    assert meter.compute() == before


def test_quantities_without_a_denominator_are_left_out():
    made = step(1, 6)
    nothing = AcceptanceMeter(block_size=K)
    assert nothing.compute() == {}
    nothing.update(terms_of(step(1, 6, keep=0.0)))
    assert nothing.compute() == {}

    meter = AcceptanceMeter(block_size=K)
    meter.update(terms_of(replace(made, confidence_pred=None)))
    assert set(meter.compute()) == (ACCEPTANCE | LOSSES) - {"confidence_loss"}

    meter = AcceptanceMeter(block_size=K)
    meter.update(terms_of(made, l1_loss_alpha=0.0))
    assert set(meter.compute()) == (ACCEPTANCE | CONFIDENCE | LOSSES) - {"l1_loss"}

    meter = AcceptanceMeter(block_size=K)
    no_target = replace(made, confidence_pred=None, aligned_target_logits=None)
    meter.update(terms_of(no_target, l1_loss_alpha=0.0))
    assert set(meter.compute()) == {"loss", "ce_loss"}

    meter = AcceptanceMeter(block_size=K)
    mask = made.eval_mask.clone()
    mask[..., 2] = False
    meter.update(terms_of(dataclasses.replace(made, eval_mask=mask)))
    assert "accept_rate@2" not in meter.compute()
    assert "accept_rate@1" in meter.compute()

    meter = AcceptanceMeter(block_size=K)
    dropped = torch.zeros_like(made.block_keep_mask)
    meter.update(terms_of(dataclasses.replace(made, block_keep_mask=dropped)))
    assert set(meter.compute()) == (ACCEPTANCE | CONFIDENCE | LOSSES) - {"tau"}


def test_reset_forgets_everything():
    meter = AcceptanceMeter(block_size=K)
    meter.update(terms_of(step(1, 6)))
    meter.reset()
    assert meter.compute() == {}
    made = step(2, 3)
    meter.update(terms_of(made))
    assert_close(meter.compute(), quantities(made))


def test_update_reads_nothing_on_the_host():
    # A meta tensor has no values, so whatever looks at one raises.
    terms = {name: value.to("meta") for name, value in terms_of(step(1, 3)).items()}
    meter = AcceptanceMeter(block_size=K)
    for _ in range(2):
        meter.update(terms)
    with pytest.raises((RuntimeError, NotImplementedError)):
        meter.compute()


def test_update_neither_changes_nor_holds_the_terms():
    terms = terms_of(step(1, 3))
    before = {name: value.clone() for name, value in terms.items()}
    meter = AcceptanceMeter(block_size=K)
    meter.update(terms)
    assert all(torch.equal(terms[name], value) for name, value in before.items())
    sums = meter.compute()
    for value in terms.values():
        value.fill_(7.0)
    assert meter.compute() == sums
    with_graph = {name: value.requires_grad_() for name, value in terms_of(step(1, 3)).items()}
    meter = AcceptanceMeter(block_size=K)
    meter.update(with_graph)
    assert not meter.state_dict()["sums"].requires_grad


def test_many_small_steps_keep_their_digits():
    terms = {name: value.clone() for name, value in terms_of(step(1, 3)).items()}
    for name in ("tau_num", "tau_den"):
        terms[name].fill_(1.0)
    meter = AcceptanceMeter(block_size=K)
    meter.update({**terms, "tau_num": torch.tensor(2.0**25), "tau_den": torch.tensor(2.0**24)})
    for _ in range(3):
        meter.update(terms)
    # In fp32 the ones would be lost next to 2**24.
    assert meter.compute()["tau"] == (2.0**25 + 3) / (2.0**24 + 3)


def test_terms_of_another_block_size_are_refused():
    meter = AcceptanceMeter(block_size=K + 1)
    with pytest.raises(ValueError, match=rf"\({K},\).*block_size={K + 1}"):
        meter.update(terms_of(step(1, 3)))
    assert meter.compute() == {}
    with pytest.raises(ValueError, match="block_size is 0"):
        AcceptanceMeter(block_size=0)
    with pytest.raises(ValueError, match=f"block_size={K + 1}.*block_size={K}"):
        AcceptanceMeter(block_size=K).load_state_dict(meter.state_dict())


def through_a_file(state: dict[str, Any], tmp_path: Any) -> dict[str, Any]:
    torch.save(state, tmp_path / "meter.pt")
    return torch.load(tmp_path / "meter.pt", weights_only=True)


def test_a_checkpoint_continues_the_window(tmp_path):
    steps = [step(*arguments) for arguments in STEPS]
    first = AcceptanceMeter(block_size=K)
    first.update(terms_of(steps[0]))
    second = AcceptanceMeter(block_size=K)
    second.update(terms_of(step(9, 4)))  # what it had is replaced
    saved, before = first.state_dict(), first.compute()
    second.load_state_dict(through_a_file(saved, tmp_path))
    first.reset()
    for made in steps[1:]:
        second.update(terms_of(made))
    assert_close(second.compute(), quantities(joined(steps)))
    again = AcceptanceMeter(block_size=K)
    again.load_state_dict(saved)
    assert again.compute() == before, "the checkpoint changed with the meter"


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_a_copy_is_a_meter_of_its_own(clone):
    steps = [step(*arguments) for arguments in STEPS[:2]]
    meter = AcceptanceMeter(block_size=K)
    meter.update(terms_of(steps[0]))
    before = meter.compute()
    twin = clone(meter)
    twin.update(terms_of(steps[1]))
    assert meter.compute() == before
    assert_close(twin.compute(), quantities(joined(steps)))


def test_the_device_may_be_fixed_in_advance():
    made = step(1, 3)
    meter = AcceptanceMeter(block_size=K, device=torch.device("cpu"))
    assert meter.state_dict()["sums"].device.type == "cpu"
    meter.update(terms_of(made))
    assert_close(meter.compute(), quantities(made))


def test_one_process_without_a_group_reduces_over_itself():
    made = step(1, 3)
    meter = AcceptanceMeter(block_size=K)
    meter.update(terms_of(made))
    meter.all_reduce()
    assert_close(meter.compute(), quantities(made))


# --- Over ranks ---------------------------------------------------------------------------------

# One position against a hundred; a rank that saw no step; a step without supervision.
RANKS = ((1, 1, 0.3), (2, 28, 0.9), None, (4, 3, 0.0))


def _reduced(rank: int, world_size: int) -> dict[str, Any]:
    meter = AcceptanceMeter(block_size=K)
    found: dict[str, Any] = {"alone": meter.compute()}
    if RANKS[rank] is not None:
        meter.update(terms_of(step(*RANKS[rank])))
    else:
        terms_of(step(0, 0))  # every rank has to join in the loss
    found["mine"] = meter.compute()
    with CollectiveCounter() as counter:
        meter.all_reduce()
    found["collectives"] = (counter.events, counter.elements, counter.sent)
    found["first"] = meter.compute()
    meter.all_reduce()
    found["again"] = meter.compute()
    found["state"] = meter.state_dict()["sums"]
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    meter.all_reduce(pair)
    found["pair"] = meter.compute()
    extra = terms_of(step(20 + rank, 2))
    meter.update(extra)
    found["after an update"] = meter.compute()
    meter.all_reduce()
    found["all"] = meter.compute()
    meter.reset()
    found["reset"] = meter.compute()
    return found


def test_ranks_are_weighed_by_their_positions():
    by_rank = run_ranks(_reduced, 4)
    steps = {rank: step(*made) for rank, made in enumerate(RANKS) if made is not None}
    extra = [step(20 + rank, 2) for rank in range(4)]
    together = quantities(joined(list(steps.values())))
    for rank, found in enumerate(by_rank):
        assert found["collectives"] == (["all_reduce"], [43 + 2 * K], 1), found["collectives"]
        assert_close(found["first"], together)
        assert found["first"] == by_rank[0]["first"], "the ranks report different numbers"
        assert found["again"] == found["first"], "a second all_reduce counted twice"
        assert_close(found["pair"], quantities(joined([steps[0], steps[1]])) if rank < 2 else {})
        own = [steps[rank], extra[rank]] if rank in steps else [extra[rank]]
        assert_close(found["after an update"], quantities(joined(own)))
        assert_close(found["all"], quantities(joined([*steps.values(), *extra])))
        assert found["alone"] == found["reset"] == {}
    assert by_rank[2]["mine"] == by_rank[3]["mine"] == {}
    assert not by_rank[2]["state"].any(), "a checkpoint holds this rank's own sums"
