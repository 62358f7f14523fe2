"""``python -m dspark_ext check``: it passes what is right, and names what is not."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import subprocess
import sys
from typing import Any, Callable

import oracle
import pytest
import torch
from conftest import run_python
from torch import Tensor

from dspark_ext import _C, _backend, check, linear, reference
from dspark_ext.__main__ import main

HERE = ["check", "--cpu", "--this-process"]
LEVELS = _C.cpu_available_levels().split()


def outcomes(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, bool]]:
    """The exit status, and whether each check passed, at the active level."""
    status = main([*HERE, "--json", *arguments])
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is (status == 0)
    return status, {result["check"]: result["ok"] for result in report["results"]}


def test_help_names_the_command_and_its_options(capsys):
    for arguments, expected in ((["--help"], "check"), (["check", "--help"], "--this-process")):
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        assert exit_.value.code == 0
        text = capsys.readouterr().out
        assert [line for line in text.splitlines() if len(line) > 80] == []
        assert expected in text


def test_every_level_of_this_processor_passes_in_lines_that_fit_a_terminal():
    printed = run_python("-W", "error", "-m", "dspark_ext", "check", "--cpu")
    lines = printed.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    checked = [line for line in lines if line.endswith(" ok")]
    for level in LEVELS:
        names = [line for line in checked if line.startswith(f"cpu {level} ")]
        assert len(names) == len(checked) / len(LEVELS) > 30
    assert lines[-1].startswith(f"{len(checked)} checks in ")
    assert lines[-1].endswith("all passed")


def test_the_json_has_a_figure_and_a_limit_for_each_check(capsys):
    assert main([*HERE, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True and 0 < report["seconds"] < 300
    assert report["torch"] == torch.__version__
    for result in report["results"]:
        assert result["ok"] is True
        assert 0 <= result["figure"] <= result["limit"]
        assert result["place"] == f"cpu {_C.cpu_level()}"
        assert result["error"] is None


# --- What it would notice -----------------------------------------------------------------------


def scaled(name: str, position: int, factor: float = 1 + 1e-4) -> Callable[[Any], None]:
    """A kernel whose result number ``position`` is off by a ten-thousandth."""

    def spoil(monkeypatch: pytest.MonkeyPatch) -> None:
        right = getattr(_backend, name)

        def wrong(*arguments: Any, **keywords: Any) -> Any:
            results = right(*arguments, **keywords)
            if isinstance(results, Tensor):
                return results.mul_(factor)
            results[position].mul_(factor)
            return results

        monkeypatch.setattr(_backend, name, wrong)

    return spoil


def wrong_written_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused kernel forms a gradient with one wrong element in each row."""
    right = _backend.weighted

    def wrong(*arguments: Any) -> Any:
        results = right(*arguments)
        if arguments[-1] is not None:
            arguments[-1][..., 3] *= 2
        return results

    monkeypatch.setattr(_backend, "weighted", wrong)


def unscaled_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_backend, "scale", lambda source, factor, out: out.copy_(source))


def reads_inactive_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    right = _backend.weighted

    def wrong(draft: Tensor, target: Any, ids: Tensor, active: Any, *rest: Any) -> Any:
        return right(draft, target, ids.clamp(0, draft.shape[-1] - 1), None, *rest)

    monkeypatch.setattr(_backend, "weighted", wrong)


def keeps_ignored_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    right = _backend.weighted

    def wrong(draft: Tensor, target: Any, ids: Tensor, *rest: Any) -> Any:
        return right(draft, target, ids.clamp(min=0), *rest)

    monkeypatch.setattr(_backend, "weighted", wrong)


def sum_that_starts_from_the_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row statistics as PyTorch has them: T is Z - 1, of which fp32 keeps too few digits."""
    right = _backend.ce_and_l1

    def wrong(*arguments: Any) -> Any:
        ce, l1, draft, *others = right(*arguments)
        c, t = draft[..., 1], draft[..., 2]
        draft[..., 2] = (c + t) - c
        return ce, l1, draft, *others

    monkeypatch.setattr(_backend, "ce_and_l1", wrong)


def one_sided_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient takes a tie for p > q."""
    right = _backend.gradient

    def wrong(a: Any, b: Any, draft: Tensor, target: Any, *rest: Any) -> Tensor:
        result = right(a, b, draft, target, *rest)
        return result if target is None else result + (draft == target) * 1e-3

    monkeypatch.setattr(_backend, "gradient", wrong)


def last_bits(changed: Callable[[], bool], name: str = "weighted") -> Callable[[Any], None]:
    """A kernel whose cross-entropies differ in a last bit while ``changed()``."""

    def spoil(monkeypatch: pytest.MonkeyPatch) -> None:
        right = getattr(_backend, name)

        def wrong(*arguments: Any) -> Any:
            ce, *others = right(*arguments)
            return ce * (1 + 2.0**-22 * changed()), *others

        monkeypatch.setattr(_backend, name, wrong)

    return spoil


calls = itertools.count()


def depends_on_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    right = _backend.ce_and_l1

    def wrong(draft: Tensor, *rest: Any) -> Any:
        ce, *others = right(draft, *rest)
        return ce * (1 + 2.0**-22 * (len(draft) > 1)), *others

    monkeypatch.setattr(_backend, "ce_and_l1", wrong)


def accepts_any_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_backend, "check_ids", lambda ids, active, columns: None)
    right = _backend._prepare_ids

    def wrong(ids: Any, active: Any, columns: int) -> Any:
        ids, active = right(ids, active, columns)
        return (None if ids is None else ids.clamp(-100, columns - 1).abs()), active

    monkeypatch.setattr(_backend, "_prepare_ids", wrong)


def in_place_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark_ext.loss._can_write_over", lambda draft, target: False)


def wrong_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    right = _backend.weighted

    def wrong(draft: Tensor, *rest: Any) -> Any:
        results = right(draft, *rest)
        if rest[-1] is not None and rest[-1].data_ptr() == draft.data_ptr():
            draft[0, 0, 0, 0] += 1
        return results

    monkeypatch.setattr(_backend, "weighted", wrong)


def wrong_from_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    right = linear._row_coefficients

    def wrong(*arguments: Any) -> Any:
        a, b = right(*arguments)
        return a * 1.001, b

    monkeypatch.setattr(linear, "_row_coefficients", wrong)


def wrong_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference.gradient
    monkeypatch.setattr(reference, "gradient", lambda *arguments: right(*arguments) * 1.0001)


OBJECTIVES = ("float32", "bfloat16", "float16", "float64", "bfloat16/float32")
DTYPES = ("float32", "bfloat16", "float16", "float64")


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (scaled("weighted", 0), ["objective and terms, float32", "objective and terms, float64"]),
        (scaled("weighted", 1), ["objective and terms, bfloat16/float32"]),
        (scaled("ce_and_l1", 0), [f"ce_and_l1, {name}" for name in DTYPES]),
        (scaled("ce_and_l1", 1), ["l1_distance", "objective and terms, float16"]),
        (
            scaled("gradient", 0, 1.01),
            [*(f"ce_and_l1's gradient, {name}" for name in DTYPES), "l1_distance's gradient"],
        ),
        (scaled("gradient", 0), ["token_log_prob's gradient", "tied maxima", "logits of -inf"]),
        (scaled("log_softmax", 1), ["token_log_prob"]),
        (
            wrong_written_gradient,
            ["objective's gradient, float32", "objective's gradient, float64", "the id -100"],
        ),
        (
            unscaled_backward,
            [f"objective's gradient, {name}" for name in OBJECTIVES if name != "float16"],
        ),
        (reads_inactive_rows, ["inactive rows that hold NaN"]),
        (keeps_ignored_ids, ["the id -100"]),
        (sum_that_starts_from_the_maximum, ["confident rows, gradient"]),
        (scaled("ce_and_l1", 0), ["confident rows, cross-entropy"]),
        (one_sided_sign, ["identical rows have no gradient"]),
        (
            last_bits(lambda: torch.get_num_threads() == 3),
            ["the same bits at any number of threads"],
        ),
        (
            last_bits(lambda: torch.get_num_threads() == 5, "ce_and_l1"),
            ["the same bits at any number of threads"],
        ),
        (last_bits(lambda: next(calls) % 5 == 0), ["the same bits on every call"]),
        (depends_on_neighbours, ["a row alone and among others"]),
        (accepts_any_id, ["an id that is no column is refused"]),
        (in_place_elsewhere, ["a gradient in place"]),
        (wrong_in_place, ["a gradient in place"]),
        (wrong_from_hidden_states, ["from hidden states, float32", "from hidden states, float64"]),
        (wrong_reference, ["the PyTorch path, float32"]),
    ],
    ids=lambda value: getattr(value, "__name__", None) or ", ".join(value),
)
def test_what_is_wrong_is_named_and_the_exit_status_says_so(spoil, named, capsys, monkeypatch):
    # The figures are those of small inputs: what is spoilt here is spoilt everywhere.
    monkeypatch.setattr(check, "VOCABULARIES", (250,))
    spoil(monkeypatch)
    status, passed = outcomes(capsys)
    assert status == 1
    assert {name for name in named if passed[name]} == set()


def test_every_check_is_one_that_some_fault_above_makes_fail():
    (parametrize,) = test_what_is_wrong_is_named_and_the_exit_status_says_so.pytestmark
    named = {name for _, names in parametrize.args[1] for name in names}
    place = check.places(_C.cpu_level(), cpu_only=True)[0]
    without = {what for what, _, _ in check.checks(place)} - named
    assert without == {
        "objective and terms, bfloat16",  # beside that of bfloat16/float32, of the same kernel
        "objective's gradient, float16",  # beside that of ce_and_l1, which fp16 drafts take
        "a batch without an active row",
    }


def test_a_loss_without_an_active_row_must_be_zero(capsys, monkeypatch):
    monkeypatch.setattr(check, "VOCABULARIES", (250,))
    monkeypatch.setattr("dspark_ext.loss._inverse", lambda denominator: 1 / (denominator + 1e-6))
    monkeypatch.setattr(
        "dspark_ext.loss._confidence_num", lambda outputs, l1, weights: weights.new_ones(())
    )
    assert outcomes(capsys)[1]["a batch without an active row"] is False


def test_a_line_says_failed_beside_its_figure(capsys, monkeypatch):
    monkeypatch.setattr(check, "VOCABULARIES", (250,))
    scaled("log_softmax", 1)(monkeypatch)
    assert main(HERE) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    failed = [line for line in lines if line.endswith("FAILED")]
    assert len(failed) == 2 and "token_log_prob " in failed[0] and " of 5e-06" in failed[0]
    assert lines[-1] == failed[1] and lines[-1].endswith(": 1 FAILED")


def test_a_check_that_raises_has_failed_and_the_others_still_run(capsys, monkeypatch):
    def broken(*arguments: Any) -> Any:
        raise RuntimeError("no such kernel: " + "a long reason " * 12)

    monkeypatch.setattr(check, "VOCABULARIES", (250,))
    monkeypatch.setattr(_backend, "log_softmax", broken)
    assert main(HERE) == 1
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert "RuntimeError: no such kernel" in text
    # Its value and gradient, and the ids that it no longer refuses with an IndexError.
    assert "ce_and_l1, float32" in text and "3 FAILED" in text


def test_a_result_that_is_not_a_number_has_failed(capsys, monkeypatch):
    monkeypatch.setattr(check, "VOCABULARIES", (250,))
    scaled("log_softmax", 1, math.nan)(monkeypatch)
    assert main([*HERE, "--json"]) == 1
    (failed,) = (r for r in json.loads(capsys.readouterr().out)["results"] if not r["ok"])
    assert failed["check"] == "token_log_prob"
    assert failed["figure"] is None and "nan" in failed["error"]


def test_a_level_whose_process_dies_is_reported(capsys, monkeypatch):
    monkeypatch.setattr(check, "VOCABULARIES", (250,))
    monkeypatch.setattr(_C, "cpu_available_levels", lambda: f"{_C.cpu_level()} quantum")
    died = subprocess.CompletedProcess([], -4, stdout="", stderr="some\nillegal instruction\n")
    environments = []

    def run(command: list[str], **keywords: Any) -> Any:
        environments.append(keywords["env"]["DSPARK_EXT_CPU_LEVEL"])
        return died

    monkeypatch.setattr(check.subprocess, "run", run)
    assert main(["check", "--cpu"]) == 1
    assert environments == ["quantum"]
    text = capsys.readouterr().out
    assert "status -4: illegal instruction" in text


def test_a_level_that_does_not_exist_is_explained():
    done = subprocess.run(
        [sys.executable, "-m", "dspark_ext", "check"],
        capture_output=True,
        text=True,
        env={**check.os.environ, "DSPARK_EXT_CPU_LEVEL": "quantum"},
    )
    assert done.returncode == 1
    assert "DSPARK_EXT_CPU_LEVEL=quantum" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(("kernels", "name"), [(True, "cuda:0"), (False, "cuda:0 torch")])
def test_a_gpu_is_checked_with_what_the_build_has_for_it(kernels, name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(_backend, "has_kernels", lambda device, *dtypes: kernels)
    cpu, gpu = check.places("avx2")
    assert (cpu.name, cpu.impl) == ("cpu avx2", "kernel")
    assert (gpu.name, gpu.impl) == (name, "kernel" if kernels else "torch")
    assert gpu.device == torch.device("cuda", 0)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_every_gpu_passes(capsys):
    assert main(["check", "--this-process", "--json"]) == 0
    places = {result["place"] for result in json.loads(capsys.readouterr().out)["results"]}
    assert len(places) == 1 + torch.cuda.device_count()


# --- Its mathematics ----------------------------------------------------------------------------


def test_its_float64_objective_is_the_definition():
    made = check._case(250, torch.float64, torch.float64)
    loss, terms, gradients = check._differentiated(made, 1.0)
    expected = oracle.objective(made, **check.SETTINGS)
    assert float(loss) == pytest.approx(expected.loss, rel=1e-12)
    assert terms.keys() == expected.terms.keys()
    for name, value in expected.terms.items():
        assert terms[name].tolist() == pytest.approx(
            value.tolist() if isinstance(value, Tensor) else value, rel=1e-12, abs=1e-12
        ), name
    active = (made.eval_mask != 0)[..., None]
    torch.testing.assert_close(gradients["draft_logits"], expected.draft_gradient)
    torch.testing.assert_close(gradients["confidence_pred"], expected.confidence_gradient)
    assert not gradients["draft_logits"][~active.expand_as(made.draft_logits)].any()


@pytest.mark.parametrize("pair", [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_rounding_decides_no_sign_in_its_inputs(pair):
    for columns in check.VOCABULARIES:
        made = check._case(columns, *pair)
        p, q = (
            value.double().softmax(-1) for value in (made.draft_logits, made.aligned_target_logits)
        )
        assert float((p.log() - q.log()).abs().min()) > 0.02


def test_its_inputs_are_not_changed_by_the_checks():
    made = check._case(check.SMALL, torch.float32, torch.float32)
    before = {name: value.clone() for name, value in dataclasses.asdict(made).items()}
    place = check.places(_C.cpu_level(), cpu_only=True)[0]
    for measure in (check.in_place, check.inactive_rows, check.repeated_calls):
        measure(place)
    for name, value in before.items():
        assert torch.equal(getattr(made, name), value), name
