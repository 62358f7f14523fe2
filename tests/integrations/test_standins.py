"""The trainers that no release of theirs lets a test run: their sources' layout and mathematics in
small packages of the tests' own, with and without the patch on the same inputs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any, Optional

import documentation
import pytest
import torch
from comparison import OpsUsed, relative
from inputs import normal, outputs, replace
from process_groups import run_ranks
from torch import Tensor

import dspark_ext
from dspark_ext.integrations import IntegrationError, available, patch

STANDINS = Path(__file__).parent / "standins"
SETTINGS = {
    "loss_decay_gamma": 4.0,
    "ce_loss_alpha": 0.1,
    "l1_loss_alpha": 0.9,
    "confidence_head_alpha": 1.0,
}
# Two implementations that round in fp32, over sums of about 24 rows of 33 columns.
CLOSE = 2e-6


def forget(*packages: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def standins(tmp_path, monkeypatch):
    """The stand-in packages before everything else on ``sys.path``, with verl-SpeCo's version."""
    metadata = tmp_path / "verl_speco-0.1.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: verl-speco\nVersion: 0.1.0\n")
    monkeypatch.syspath_prepend(str(STANDINS))
    monkeypatch.syspath_prepend(str(tmp_path))
    forget("deepspec", "megatron", "verl_speco")
    yield
    forget("deepspec", "megatron", "verl_speco")


def test_the_standins_are_found():
    found = {trainer.name: trainer for trainer in available()}
    for name in ("deepspec", "megatron_bridge", "verl_speco"):
        assert found[name].patchable, found[name]


# --- DeepSpec -----------------------------------------------------------------------------------


def deepspec_step(made: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Loss, gradients and metrics of a trainer's step without and with the patch."""
    trainer = importlib.import_module("deepspec.trainer.dspark_trainer").DSparkTrainer(**settings)
    metrics = importlib.import_module("deepspec.utils.metrics")
    results = {}
    for patched in (False, True):
        metrics.calls.clear()
        fresh = replace(made)
        handle = patch("deepspec") if patched else None
        with OpsUsed() as ops:
            loss = trainer.run_batch(fresh)
            loss.backward()
        assert bool(ops.names) == patched
        results[patched] = {
            "loss": loss.detach(),
            "draft": fresh.draft_logits.grad,
            "confidence": None if fresh.confidence_pred is None else fresh.confidence_pred.grad,
            "metrics": list(metrics.calls),
        }
        if handle is not None:
            handle.undo()
    return results


def assert_same_step(results: dict[bool, dict[str, Any]]) -> None:
    without, patched = results[False], results[True]
    for name in ("loss", "draft", "confidence"):
        if without[name] is not None:
            assert relative(patched[name], without[name]) <= CLOSE, name
    kept = [(name, reduction, tag) for name, _, _, reduction, tag in without["metrics"]]
    assert [(name, reduction, tag) for name, _, _, reduction, tag in patched["metrics"]] == kept
    for mine, theirs in zip(patched["metrics"], without["metrics"]):
        assert mine[1] == pytest.approx(theirs[1], rel=CLOSE, abs=2e-6), mine[0]
        if theirs[2] is None:
            assert mine[2] is None, mine[0]
        else:
            assert mine[2] == pytest.approx(theirs[2], rel=CLOSE), mine[0]


def _deepspec_rank(rank: int, world_size: int, case: dict[str, Any]) -> dict[bool, Any]:
    sys.path.insert(0, str(STANDINS))
    made = outputs(seed=7 + rank, keep=case.get("keep", 0.75), confidence=case["confidence"])
    if not case["target"]:
        made.aligned_target_logits = None
    return deepspec_step(made, {**SETTINGS, **case["settings"]})


@pytest.mark.parametrize(
    ("confidence", "target", "settings"),
    [
        (True, True, {}),
        (False, True, {}),
        (True, True, {"l1_loss_alpha": 0.0, "loss_decay_gamma": None}),
        # Acceptance is logged although the loss needs no L1; positions even without a target.
        (False, True, {"l1_loss_alpha": 0.0}),
        (False, False, {"l1_loss_alpha": 0}),
    ],
)
def test_deepspec_logs_every_metric_and_trains_alike_on_two_ranks(confidence, target, settings):
    case = {"confidence": confidence, "target": target, "settings": settings}
    ranks = run_ranks(_deepspec_rank, 2, case)
    for results in ranks:
        assert_same_step(results)
    names = [call[0] for call in ranks[0][True]["metrics"]]
    assert names[:5] == ["accept_rate@0", "accept_rate@1", "accept_rate@2", "accept_rate@3",
                         "tau_probabilistic"]  # fmt: skip
    assert ("confidence_loss" in names) == confidence
    assert ("l1_loss" in names) == (settings.get("l1_loss_alpha") is None)
    assert names[-1] == "loss"
    assert ranks[0][True]["loss"] != ranks[1][True]["loss"]
    accepted = sum(call[1] for call in ranks[0][True]["metrics"][:4])
    assert (accepted > 0) == target


def test_deepspec_without_a_supervised_position_is_zero_and_still_logs():
    case = {"confidence": True, "target": True, "settings": {}, "keep": 0.0}
    for results in run_ranks(_deepspec_rank, 2, case):
        assert results[True]["loss"] == 0 and results[True]["draft"].norm() == 0
        metrics = {name: (value, den) for name, value, den, _, _ in results[True]["metrics"]}
        # The original leaves l1_loss out here; sums of zero leave its average alone.
        assert metrics.pop("l1_loss") == (0, 0)
        assert list(metrics) == [call[0] for call in results[False]["metrics"]]
        assert metrics["ce_loss"] == (0, 0) and metrics["tau_probabilistic"] == (0, 0)


# --- Megatron Bridge ----------------------------------------------------------------------------


def megatron_loss() -> Any:
    return importlib.import_module("megatron.bridge.training.post_training.dspark.loss")


@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("with_target", [True, False])
def test_megatron_bridge_rows_have_the_same_values_dtypes_and_gradients(
    dtype, ids_dtype, with_target
):
    module = megatron_loss()
    made = outputs(seed=3, dtype=dtype, confidence=False)
    made.target_ids = made.target_ids.to(ids_dtype)
    target = made.aligned_target_logits if with_target else None
    upstream = normal(9, 2, 2, 3, 4).float()
    results = []
    for patched in (False, True):
        fresh = replace(made)
        handle = patch("megatron_bridge") if patched else None
        ce, l1 = module._ce_and_l1_per_token(fresh.draft_logits, fresh.target_ids, target, 5)
        if handle is not None:
            handle.undo()
        (ce * upstream[0] + l1 * upstream[1]).sum().backward()
        results.append((ce, l1, fresh.draft_logits.grad))
    for mine, theirs in zip(results[1], results[0]):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
    (ce, l1, gradient), (their_ce, their_l1, their_gradient) = results[1], results[0]
    assert relative(ce, their_ce) <= CLOSE and relative(l1, their_l1) <= CLOSE
    # bf16 rounds once, at the end, in both.
    assert relative(gradient, their_gradient) <= (4e-3 if dtype == torch.bfloat16 else CLOSE)


def test_megatron_bridge_trains_alike_through_its_own_loss():
    module = megatron_loss()
    losses, gradients = [], []
    for patched in (False, True):
        fresh = outputs(seed=3, confidence=False)
        handle = patch("megatron_bridge") if patched else None
        with OpsUsed() as ops:
            loss = module.dspark_loss(fresh)
            loss.backward()
        assert bool(ops.names) == patched
        if handle is not None:
            handle.undo()
        losses.append(loss)
        gradients.append(fresh.draft_logits.grad)
    assert relative(losses[1], losses[0]) <= CLOSE
    assert relative(gradients[1], gradients[0]) <= CLOSE


# --- verl-SpeCo's source repository -------------------------------------------------------------


def test_verl_speco_sources_fused_losses_are_replaced_where_they_are_used():
    backend = importlib.import_module("verl_speco.backends.dspark_trainer_backend")
    draft, target = normal(1, 20, 33) * 2, normal(2, 20, 33) * 2
    labels, weights = torch.arange(20), torch.rand(20, generator=torch.Generator().manual_seed(3))
    losses, gradients = [], []
    for patched in (False, True):
        logits = draft.float().requires_grad_()
        handle = patch("verl_speco") if patched else None
        if handle is not None:
            assert handle.replaced == (
                "verl_speco.ops.dspark_fused_loss.fused_label_cross_entropy",
                "verl_speco.ops.dspark_fused_loss.fused_total_variation",
            )
        with OpsUsed() as ops:
            loss = backend.loss_of_active_rows(logits, target.float(), labels, weights)
            loss.backward()
        assert bool(ops.names) == patched
        if handle is not None:
            handle.undo()
        losses.append(loss)
        gradients.append(logits.grad)
    assert relative(losses[1], losses[0]) <= CLOSE
    assert relative(gradients[1], gradients[0]) <= CLOSE


# --- The documentation --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "name"), [("DeepSpec", "deepspec"), ("Megatron Bridge", "megatron_bridge")]
)
def test_the_documented_patches_of_the_standins_run(section, name):
    (block,) = documentation.blocks("docs/integrations.md", section=section)
    handle: Optional[Any] = None
    try:
        names: dict[str, Any] = {}
        exec(block, names)
        handle = patch(name)  # a second use, to be able to end the first
        assert names["handle"].replaced == handle.replaced
    finally:
        if handle is not None:
            names["handle"].undo()
            handle.undo()


def test_the_documented_mechanism_runs(monkeypatch):
    class Toy:
        def __getattr__(self, name: str) -> Any:
            return lambda *arguments, **keywords: None

    mechanism = documentation.blocks("docs/integrations.md", section="One line")
    assert len(mechanism) == 2
    monkeypatch.setattr(
        dspark_ext.integrations, "patch", lambda name: patch("deepspec")
    )  # the trainer of the text is not installed here
    names: dict[str, Any] = {"train": Toy().train, "trainer": Toy()}
    for block in mechanism:
        exec(block, names)
    names["handle"].undo()


def torchspec_forward(draft: Tensor, target: Tensor) -> dict[str, Any]:
    """What stands before the recipe's lines in TorchSpec's ``DSparkModel.forward``."""
    made = outputs(seed=5)
    eval_bool = made.eval_mask
    decay = torch.exp(-torch.arange(4) / 4.0)
    return {
        "logits_4d": draft,
        "aligned_target_logits": target,
        "target_ids": made.target_ids,
        "eval_bool": eval_bool,
        "decay_weight_mask": eval_bool.float() * decay,
    }


def test_the_torchspec_recipe_gives_what_its_lines_gave():
    recipe, without_target = documentation.blocks("docs/integrations.md", section="TorchSpec")
    made = outputs(seed=5)
    draft = made.draft_logits
    names = torchspec_forward(draft, made.aligned_target_logits)
    exec(recipe, names)
    expected_draft = draft.detach().clone().requires_grad_()
    ce = torch.nn.functional.cross_entropy(
        expected_draft.flatten(0, 2), made.target_ids.flatten(), reduction="none"
    ).view(made.target_ids.shape)
    l1 = (expected_draft.softmax(-1) - made.aligned_target_logits.softmax(-1)).abs().sum(-1)
    weights = names["decay_weight_mask"]
    expected = {
        "ce_num": (ce * weights).sum(),
        "l1_num": (l1 * weights).sum(),
        "accept_rate": (1 - l1 / 2).clamp(0, 1) * made.eval_mask,
    }
    names["accept_rate"] = names["accept_rate"] * made.eval_mask
    for name, value in expected.items():
        assert relative(names[name], value) <= CLOSE, name
    (0.1 * names["ce_num"] + 0.9 * names["l1_num"]).backward()
    (0.1 * expected["ce_num"] + 0.9 * expected["l1_num"]).backward()
    assert relative(draft.grad, expected_draft.grad) <= CLOSE

    names = torchspec_forward(draft.detach(), made.aligned_target_logits)
    exec(without_target, names)
    assert relative((names["ce_per_token"] * weights).sum(), expected["ce_num"]) <= CLOSE


def test_megatron_bridges_release_is_refused_by_its_missing_module(tmp_path, monkeypatch):
    package = tmp_path / "release" / "megatron" / "bridge"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "release")])
    with pytest.raises(IntegrationError, match=r"without the module megatron\.bridge\.training"):
        patch("megatron_bridge")
