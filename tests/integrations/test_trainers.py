"""The trainers' own code, from their packages, with and without the patch on the same inputs.

Run in an environment of their own: requirements.txt says what is in it, .ci/run makes it.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import documentation
import pytest
import torch
from comparison import OpsUsed, compare, judge, relative
from conftest import run_python
from torch import Tensor
from trainer_steps import STEPS, K, Step, normal

from dspark_ext.integrations import IntegrationError, available, patch

# Trainers warn of what they miss when they are imported, which is theirs to fix.
pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("default")]

RELEASES = {
    "nemo_automodel": "0.7.0",
    "megatron_bridge": "0.6.2",
    "modelopt": "0.47.0",
    "speculators": "0.9.0",
    "specforge": "0.2.0",
    "verl_speco": "0.1.0",
}
# Both sides round in fp32, over some hundred rows of some hundred columns. The gradient has gone
# through the drafter's backward, which sums over those rows.
VALUES, GRADIENT = 1e-6, 3e-6


@pytest.mark.parametrize("name", RELEASES)
def test_the_release_is_installed(name):
    found = {trainer.name: trainer for trainer in available()}
    assert name in found, f"{name} is not installed"
    assert found[name].version == RELEASES[name]
    assert found[name].patchable == (name != "megatron_bridge")


def assert_trains_alike(step: Step, ops: str) -> None:
    """``ops``: the op of this package that has to have run with the patch."""
    difference = compare(step)
    assert difference.loss <= VALUES
    assert difference.values <= VALUES
    assert difference.gradient <= GRADIENT
    assert ops in difference.ops, difference.ops


# Of so few tokens some are predicted right, on either side of the mask.
@pytest.mark.parametrize("vocab", [300, 12])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_trains_alike(name, vocab):
    ops = "weighted_fwd" if name == "nemo_automodel" else "ce_and_l1_fwd"
    assert_trains_alike(STEPS[name](vocab, 12), ops)


def test_megatron_bridges_release_has_no_dspark_loss_and_is_refused():
    with pytest.raises(IntegrationError, match=r"megatron-bridge 0\.6\.2 without the module"):
        patch("megatron_bridge")


# --- NeMo AutoModel -----------------------------------------------------------------------------


def test_nemo_automodels_reexports_are_all_replaced():
    package = "nemo_automodel.components.speculative.dspark"
    modules = [importlib.import_module(package + end) for end in ("", ".loss", ".core")]
    originals = [module.compute_dspark_loss for module in modules]
    with patch("nemo_automodel"):
        replacements = {module.compute_dspark_loss for module in modules}
        assert len(replacements) == 1 and replacements.isdisjoint(originals)
    assert [module.compute_dspark_loss for module in modules] == originals


def test_nemo_automodels_gradient_is_closer_to_float64_with_the_patch():
    without, patched = judge(STEPS["nemo_automodel"](4096, 12))
    # fp32 arithmetic and one rounding; the original's own softmax loses digits to 4,096 columns.
    assert patched <= 2e-7
    assert patched < without <= 1e-5


def test_nemo_automodel_trains_alike_in_bfloat16():
    """Its cross-entropy is rounded to bfloat16 before it is summed, ours is not."""
    difference = compare(STEPS["nemo_automodel"](300, 12, dtype=torch.bfloat16))
    assert difference.loss <= 2e-3
    assert difference.gradient <= 2e-2
    assert "weighted_fwd" in difference.ops


# --- Model Optimizer ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("chunk", [(), (1,), (7,), (1000,)])
def test_modelopts_distance_keeps_dtype_shape_and_gradient(dtype, chunk):
    module = importlib.import_module("modelopt.torch.speculative.plugins.hf_dspark")
    results = []
    for patched in (False, True):
        draft = (normal(1, 20, 300) * 3).to(dtype).requires_grad_()
        teacher = (normal(2, 20, 300) * 3).to(dtype)
        handle = patch("modelopt") if patched else None
        distance = module._tvd_per_token(draft, teacher, *chunk)
        if handle is not None:
            handle.undo()
        (distance * torch.arange(20)).sum().backward()
        results.append((distance, draft.grad))
    (theirs, their_gradient), (mine, my_gradient) = results
    assert mine.dtype == theirs.dtype == torch.float32 and mine.shape == theirs.shape
    assert relative(mine, theirs) <= VALUES
    # One rounding to bf16 at the end of each.
    assert relative(my_gradient, their_gradient) <= (4e-3 if dtype == torch.bfloat16 else GRADIENT)


# --- speculators --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["ce", "tv"])
def test_speculators_fused_losses_are_its_eager_ones(name, dtype):
    losses = importlib.import_module("speculators.losses.utils")
    # Resolved before the patch, as a trainer may have done.
    fused = losses.resolve_loss_config(name, "fused")[name][0]
    eager = losses.resolve_loss_config(name, "eager")[name][0]
    targets = (normal(2, 1, 20, 300) * 3).to(dtype)
    with patch("speculators"):
        results = []
        for loss in (eager, fused):
            logits = (normal(1, 1, 20, 300) * 3).to(dtype).requires_grad_()
            with OpsUsed() as ops:
                values = loss(logits, targets)
            assert bool(ops.names) == (loss is fused)
            (values * torch.arange(20)).sum().backward()
            results.append((values, logits.grad))
    (theirs, their_gradient), (mine, my_gradient) = results
    assert mine.shape == theirs.shape == (1, 20) and mine.dtype == torch.float32
    bf16 = dtype == torch.bfloat16
    assert relative(mine, theirs) <= (4e-3 if bf16 and name == "ce" else VALUES)
    assert relative(my_gradient, their_gradient) <= (4e-3 if bf16 else GRADIENT)


def test_speculators_other_fused_losses_still_ask_for_triton():
    losses = importlib.import_module("speculators.losses.utils")
    logits = normal(1, 1, 2, 30)
    with patch("speculators"), pytest.raises(RuntimeError, match="Triton"):
        losses.kl_div_loss(logits, logits)
    with pytest.raises(RuntimeError, match="Triton"):
        losses.tv_loss(logits, logits)


def test_speculators_metrics_compile_into_one_graph_with_the_patch():
    metrics = importlib.import_module("speculators.models.dspark.metrics")
    losses = importlib.import_module("speculators.losses.utils")
    config = losses.resolve_loss_config('{"ce": 0.1, "tv": 0.9}')
    targets, confidence = normal(2, 1, 4 * K, 300) * 3, normal(3, 1, 4 * K)
    mask = torch.ones(1, 4 * K)

    def step(logits: Tensor) -> Tensor:
        # tv_loss_fn is left to its default, which was bound when the module was imported.
        return metrics.compute_metrics(logits, targets, confidence, mask, K, config)[0]

    with patch("speculators"):
        results = []
        for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
            logits = (normal(1, 1, 4 * K, 300) * 3).requires_grad_()
            loss = function(logits)
            loss.backward()
            results.append((loss, logits.grad))
    assert relative(results[1][0], results[0][0]) <= VALUES
    assert relative(results[1][1], results[0][1]) <= GRADIENT


# --- SpecForge ----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_blocks", [0, 5])
@pytest.mark.parametrize(
    "settings",
    [
        {"dspark_l1_loss_alpha": 0.0},
        {"dspark_confidence_head_alpha": 0.0},
        {"dspark_l1_loss_alpha": 0.0, "dspark_confidence_head_alpha": 0.0},
        {"loss_decay_gamma": None},
    ],
)
def test_specforge_trains_alike_with_any_of_its_terms(settings, chunk_blocks):
    step = STEPS["specforge"](300, 12, chunk_blocks=chunk_blocks)
    for name, value in settings.items():
        assert hasattr(step.module, name)
        setattr(step.module, name, value)
    no_target = len([name for name in settings if name.endswith("alpha")]) == 2
    assert_trains_alike(step, "log_softmax_fwd" if no_target else "ce_and_l1_fwd")


# --- verl-SpeCo ---------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_mode", ["full_vocab", "restricted_ce", "sampled_ce"])
@pytest.mark.parametrize("chunk", [0, 10])
def test_verl_speco_trains_alike_in_every_mode(loss_mode, chunk):
    assert_trains_alike(
        STEPS["verl_speco"](300, 12, loss_mode=loss_mode, chunk=chunk), "ce_and_l1_fwd"
    )


def test_verl_specos_l1_method_refuses_and_returns_what_the_original_does():
    backend = importlib.import_module("verl_speco.backends.dspark_trainer_backend")
    weight = normal(3, 30, 8)

    class Model:
        l1_chunk_size = 0

    def terms(rows: int, columns: int) -> Any:
        return backend.DSparkTrainingModel._compute_l1_loss_for_active(
            Model(),
            active_hidden=normal(1, rows, 8),
            active_prev_tokens=torch.zeros(rows, dtype=torch.long),
            active_target_hidden=normal(2, rows, 8),
            active_weights=torch.ones(rows),
            lm_head_weight=weight,
            active_draft_log_probs=normal(4, rows, columns).log_softmax(-1),
        )

    for rows in (0, 4):
        theirs = terms(rows, 30)
        with patch("verl_speco"):
            mine = terms(rows, 30)
        for value, expected in zip(mine, theirs):
            assert value.shape == () and value.dtype == expected.dtype
            assert relative(value, expected) <= VALUES
    with patch("verl_speco"), pytest.raises(ValueError, match=r"shape \(4, 30\), got \(4, 31\)"):
        terms(4, 31)


# --- The documentation --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ("NeMo AutoModel", "nemo_automodel"),
        ("Model Optimizer", "modelopt"),
        ("speculators", "speculators"),
        ("SpecForge", "specforge"),
        ("verl-SpeCo", "verl_speco"),
    ],
)
def test_the_documented_patches_run(section, name):
    (block,) = documentation.blocks("docs/integrations.md", section=section)
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["handle"].name == name
    names["handle"].undo()


def test_the_readmes_patch_runs():
    (block,) = documentation.blocks("README.md")
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["handle"].name == "nemo_automodel"
    names["handle"].undo()


def test_the_documented_command_runs_a_trainers_own_tests_with_the_patch(tmp_path):
    blocks = documentation.blocks("docs/integrations.md", "bash", "Compared")
    (command,) = [block for block in blocks if "pytest.main" in block]
    theirs = tmp_path / "test_theirs.py"
    theirs.write_text(
        "from nemo_automodel.components.speculative.dspark.loss import compute_dspark_loss\n\n\n"
        "def test_the_loss_is_patched():\n    assert compute_dspark_loss.__wrapped__\n"
    )
    script = re.sub(r"tests/unit_tests/\S+", str(theirs), command)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_the_figures_are_printed():
    script = str(Path(__file__).parent / "figures.py")
    blocks = documentation.blocks("docs/integrations.md", "bash", "Compared")
    assert any("figures.py" in block for block in blocks)
    printed = run_python(script, "--vocab", "300", "--rows", "28", "nemo_automodel", "specforge")
    rows = [line.count("|") for line in printed.splitlines() if line.startswith("|")]
    assert rows == [7] * 4
    assert "error against float64" in printed.splitlines()[-1]
