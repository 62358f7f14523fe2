"""The types that a user's own code is checked with: mypy on a snippet, strict."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import dspark_ext

pytest.importorskip("mypy")

PACKAGE = Path(dspark_ext.__file__).parent

RIGHT = """
from typing import Optional

import torch
from torch import Tensor
from typing_extensions import assert_type

import dspark_ext.integrations
from dspark_ext import (
    AcceptanceMeter,
    DSparkForwardOutput,
    DSparkLinearOutput,
    DSparkLoss,
    ce_and_l1,
    compute_dspark_linear_loss,
    compute_dspark_loss,
    l1_distance,
    loss_denominators,
    token_log_prob,
)
from dspark_ext.metrics import Reliability


def train(draft: Tensor, target: Tensor, ids: Tensor, mask: Tensor, keep: Tensor) -> float:
    outputs = DSparkForwardOutput(draft, ids, mask, keep, aligned_target_logits=target)
    assert_type(outputs.confidence_pred, Optional[Tensor])
    denominators = assert_type(loss_denominators([mask], 4.0), Tensor)
    loss, terms = compute_dspark_loss(
        outputs=outputs,
        loss_decay_gamma=None,
        ce_loss_alpha=0.1,
        l1_loss_alpha=0.9,
        confidence_head_alpha=0,
        return_terms=True,
        denominators=denominators,
    )
    assert_type(loss, Tensor)
    meter = AcceptanceMeter(block_size=7, device=torch.device("cpu"))
    meter.update(terms, outputs=outputs)
    meter.all_reduce()
    assert_type(meter.reliability(), Optional[Reliability])
    numbers = assert_type(meter.compute(), dict[str, float])
    return numbers["tau"]


def rows(draft: Tensor, target: Tensor, ids: Tensor) -> Tensor:
    ce, l1 = assert_type(ce_and_l1(draft, target, ids), tuple[Tensor, Tensor])
    distance = assert_type(l1_distance(draft, target, impl="torch"), Tensor)
    return ce + l1 + distance - assert_type(token_log_prob(draft, ids), Tensor)


def from_hidden_states(hidden: Tensor, head: Tensor, ids: Tensor, mask: Tensor) -> None:
    outputs = DSparkLinearOutput(hidden, head, ids, mask, mask[..., 0])
    loss = compute_dspark_linear_loss(
        outputs=outputs,
        loss_decay_gamma=4.0,
        ce_loss_alpha=1.0,
        l1_loss_alpha=0.0,
        confidence_head_alpha=0.0,
        chunk_rows=128,
    )
    assert_type(loss, Tensor)


loss_fn: torch.nn.Module = DSparkLoss(
    loss_decay_gamma=4.0, ce_loss_alpha=0.1, l1_loss_alpha=0.9, confidence_head_alpha=1.0
)
with dspark_ext.integrations.patch("nemo_automodel") as handle:
    assert_type(handle.name, str)
"""

# A mistake in each line, and what mypy says of it.
WRONG = {
    "AcceptanceMeter(block_size='7')": "arg-type",
    "AcceptanceMeter(7).compute()['tau'].item()": "attr-defined",
    "DSparkLoss(loss_decay_gamma=4.0)": "call-arg",
    "l1_distance(draft)": "call-arg",
    "compute_dspark_loss(outputs=draft)": "call-overload",
    "token_log_prob(draft, draft, impl=1)": "arg-type",
    "ce_and_l1(draft, draft, draft).backward()": "attr-defined",
    "patch(7)": "arg-type",
    "_C": "attr-defined",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One for all snippets, with mypy's cache: the first run reads all of torch."""
    return tmp_path_factory.mktemp("typing")


def mypy(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    file = folder / "snippet.py"
    file.write_text(source)
    environment = dict(os.environ)
    if "site-packages" not in PACKAGE.parts:  # a checkout, which mypy does not look for
        environment["MYPYPATH"] = str(PACKAGE.parent)
    command = [sys.executable, "-m", "mypy", "--strict", "--show-error-codes", "--no-pretty"]
    command += ["--follow-imports=silent"]  # a checkout's own modules are not the question
    return subprocess.run(
        [*command, "--config-file=", "--cache-dir", str(folder / "cache"), str(file)],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
    )


def test_the_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").is_file()
    assert (PACKAGE / "_C.pyi").is_file()


@pytest.mark.slow
def test_right_use_passes_the_strictest_check(folder):
    done = mypy(folder, RIGHT)
    complaints = [line for line in done.stdout.splitlines() if line.startswith("snippet.py")]
    assert complaints == [], done.stdout
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_mistakes_are_found_before_anything_runs(folder):
    head = textwrap.dedent(
        """
        import torch
        from dspark_ext import AcceptanceMeter, DSparkLoss, ce_and_l1, l1_distance, token_log_prob
        from dspark_ext import compute_dspark_loss
        from dspark_ext.integrations import patch
        from dspark_ext.loss import _C
        draft = torch.ones(2, 3)
        """
    )
    lines = [line for line in WRONG if line != "_C"]
    done = mypy(folder, head + "\n".join(lines) + "\n")
    found = {
        int(number): code
        for number, code in re.findall(
            r"^snippet\.py:(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.M
        )
    }
    first = head.count("\n") + 1
    expected = {first + i: WRONG[line] for i, line in enumerate(lines)}
    expected[head.splitlines().index("from dspark_ext.loss import _C") + 1] = WRONG["_C"]
    assert found == expected, done.stdout
