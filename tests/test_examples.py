"""Each example trainer runs, learns, and where it accumulates or shares, does so exactly."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from conftest import TESTS, run_python

EXAMPLES = TESTS.parent / "examples"

pytestmark = [
    pytest.mark.examples,
    pytest.mark.skipif(not EXAMPLES.is_dir(), reason="no source tree beside the tests"),
]


def run_example(name: str, *arguments: str) -> str:
    return run_python(str(EXAMPLES / name), *arguments, OMP_NUM_THREADS="1")


def numbers(text: str, name: str) -> list[float]:
    return [float(found) for found in re.findall(rf"{name} ([0-9.]+)", text)]


def test_the_plain_loop_learns_and_draws(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "acceptance.png"
    printed = run_example(
        "plain_loop.py", "--steps", "60", "--log-every", "20", "--plot", str(picture)
    )
    tau = numbers(printed, "tau")
    assert len(tau) == 3
    assert 1 < tau[0] < tau[1] < tau[2]
    assert picture.stat().st_size > 10_000


def test_the_hugging_face_trainer_learns_alike_with_and_without_accumulation():
    pytest.importorskip("transformers")
    curves = []
    for accumulate in ("1", "4"):
        printed = run_example("huggingface_trainer.py", "--steps", "24", "--accumulate", accumulate)
        curves.append([float(x) for x in re.findall(r"'loss': '?([0-9.]+)", printed)])
        assert len(numbers(printed, "tau")) == 1
    assert len(curves[0]) == 8 and curves[0][-1] < 0.8 * curves[0][0]
    assert curves[1] == pytest.approx(curves[0], rel=2e-3)


def test_the_lightning_module_learns_and_logs_the_metric():
    pytest.importorskip("lightning")
    printed = run_example("lightning_module.py", "--epochs", "2")
    tau, errors = numbers(printed, "tau"), numbers(printed, "calibration error")
    assert len(tau) == len(errors) == 2
    assert 1 < tau[0] < tau[1]
    assert all(0 < error < 1 for error in errors)


def test_two_ranks_of_ddp_and_of_fsdp_have_the_loss_curve_of_one_process():
    def torchrun(ranks: int, *arguments: str) -> list[float]:
        printed = run_python(
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
            str(EXAMPLES / "distributed.py"),
            *("--steps", "8", "--log-every", "1", *arguments),
            OMP_NUM_THREADS="1",
        )
        return numbers(printed, "loss")

    alone = torchrun(1, "--accumulate", "1")
    assert len(alone) == 8 and alone[-1] < alone[0]
    assert torchrun(2) == pytest.approx(alone, rel=1e-4)
    assert torchrun(2, "--fsdp") == pytest.approx(alone, rel=1e-4)


def test_the_examples_need_nothing_that_their_extra_does_not_bring():
    if sys.version_info < (3, 11):
        pytest.skip("needs tomllib")
    import tomllib

    extras = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    brought = {re.split(r"[>=\[]", need)[0] for need in extras["examples"] + extras["metrics"]}
    standard = set(sys.stdlib_module_names)
    for path in Path(EXAMPLES).glob("*.py"):
        imported = set(re.findall(r"^(?:from|import) (\w+)", path.read_text(), re.MULTILINE))
        assert imported - standard - brought <= {"dspark_ext", "synthetic", "torch"}, path.name
