"""The reliability of the confidence head, and the picture of a meter."""

from __future__ import annotations

import builtins
import dataclasses
import subprocess
import sys
from typing import Any

import oracle
import pytest
import torch
from inputs import outputs, replace
from process_groups import run_ranks
from test_meter import K, V, step, terms_of
from torch import Tensor

from dspark_ext import AcceptanceMeter, DSparkForwardOutput
from dspark_ext.metrics import Reliability


def accept_rates(made: DSparkForwardOutput) -> Tensor:
    """The accept rate of every position, from the definition."""
    rates = torch.zeros(made.eval_mask.shape, dtype=torch.float64)
    for i in made.eval_mask.nonzero().tolist():
        p, q = (oracle.softmax(x[tuple(i)]) for x in (made.draft_logits, _target(made)))
        rates[tuple(i)] = 1 - oracle.l1_distance(p, q) / 2
    return rates


def _target(made: DSparkForwardOutput) -> Tensor:
    assert made.aligned_target_logits is not None
    return made.aligned_target_logits


def expected_bins(steps: list[DSparkForwardOutput]) -> dict[int, tuple[float, float, int]]:
    """Bin: mean prediction, mean accept rate, positions; one position after another."""
    members: dict[int, list[tuple[float, float]]] = {}
    for made in steps:
        rates = accept_rates(made)
        for i in map(tuple, made.eval_mask.nonzero().tolist()):
            predicted = float(torch.sigmoid(made.confidence_pred[i].double()))
            members.setdefault(min(int(predicted * 10), 9), []).append((predicted, float(rates[i])))
    return {
        index: (*(sum(column) / len(pairs) for column in zip(*pairs)), len(pairs))
        for index, pairs in members.items()
    }


def assert_bins(found: Reliability, steps: list[DSparkForwardOutput]) -> None:
    expected = [bin_ for _, bin_ in sorted(expected_bins(steps).items())]
    positions = sum(count for _, _, count in expected)
    assert len(expected) >= 5
    assert found.predicted == pytest.approx([p for p, _, _ in expected], rel=1e-6)
    assert found.measured == pytest.approx([m for _, m, _ in expected], rel=1e-5)
    assert found.share == pytest.approx([count / positions for _, _, count in expected])
    error = sum(count * abs(p - m) for p, m, count in expected) / positions
    assert found.expected_calibration_error == pytest.approx(error, rel=1e-5)


STEPS = [(1, 3, 0.5), (2, 20, 0.9)]


def metered(**changes: Any) -> AcceptanceMeter:
    meter = AcceptanceMeter(block_size=K)
    for arguments in STEPS:
        made = step(*arguments)
        meter.update(terms_of(made), outputs=dataclasses.replace(made, **changes))
    return meter


def test_positions_are_compared_in_bins_of_their_prediction():
    meter = metered()
    assert_bins(meter.reliability(), [step(*arguments) for arguments in STEPS])
    quantities = meter.compute()
    assert quantities["confidence_calibration_error"] == pytest.approx(
        meter.reliability().expected_calibration_error
    )
    plain = AcceptanceMeter(block_size=K)
    for arguments in STEPS:
        plain.update(terms_of(step(*arguments)))
    del quantities["confidence_calibration_error"]
    assert plain.compute() == quantities, "the comparison changed another quantity"
    assert plain.reliability() is None


@pytest.mark.parametrize(("logit", "bin_"), [(-1e4, 0.0), (1e4, 1.0)])
def test_certain_predictions_fall_into_the_outer_bins(logit, bin_):
    made = step(1, 6)
    meter = AcceptanceMeter(block_size=K)
    certain = torch.full_like(made.confidence_pred, logit)
    meter.update(terms_of(made), outputs=dataclasses.replace(made, confidence_pred=certain))
    found = meter.reliability()
    assert (found.predicted, found.share) == ([bin_], [1.0])
    rates = accept_rates(made).sum() / made.eval_mask.sum()
    assert found.measured == pytest.approx([float(rates)], rel=1e-5)


def test_a_head_that_predicts_the_accept_rate_has_no_calibration_error():
    made = step(3, 20)
    perfect = torch.logit(accept_rates(made).clamp(1e-12, 1))
    meter = AcceptanceMeter(block_size=K)
    meter.update(terms_of(made), outputs=dataclasses.replace(made, confidence_pred=perfect))
    assert meter.compute()["confidence_calibration_error"] < 1e-6


def test_accept_rates_that_are_known_take_the_place_of_the_logits():
    made = step(2, 20)
    without = dataclasses.replace(made, draft_logits=None, aligned_target_logits=None)
    meter = AcceptanceMeter(block_size=K)
    meter.update(terms_of(made), outputs=without, accept_rate=accept_rates(made))
    assert_bins(meter.reliability(), [made])


def test_inactive_positions_are_not_read():
    made = step(1, 6)
    spoilt = replace(made)
    off = ~made.eval_mask
    for values in (spoilt.draft_logits, spoilt.aligned_target_logits, spoilt.confidence_pred):
        values[off] = torch.nan
    right, meter = AcceptanceMeter(block_size=K), AcceptanceMeter(block_size=K)
    right.update(terms_of(made), outputs=made)
    meter.update(terms_of(made), outputs=spoilt)
    assert meter.reliability() == right.reliability()


def test_nothing_is_compared_without_a_confidence_head():
    meter = metered(confidence_pred=None)
    assert meter.reliability() is None
    assert "confidence_calibration_error" not in meter.compute()


def test_a_comparison_leaves_no_graph_and_changes_no_tensor():
    made = outputs(1, (1, 5, K, V))
    before = made.draft_logits.detach().clone()
    meter = AcceptanceMeter(block_size=K)
    meter.update(terms_of(made), outputs=made)
    assert not meter.state_dict()["sums"].requires_grad
    assert torch.equal(made.draft_logits, before) and made.draft_logits.grad is None


def test_outputs_whose_accept_rate_is_not_known_are_refused():
    made = step(1, 3)
    terms = terms_of(made)
    meter = AcceptanceMeter(block_size=K)
    for name in ("draft_logits", "aligned_target_logits"):
        with pytest.raises(ValueError, match=f"no {name}.*pass accept_rate="):
            meter.update(terms, outputs=dataclasses.replace(made, **{name: None}))
    with pytest.raises(ValueError, match="accept_rate needs outputs"):
        meter.update(terms, accept_rate=accept_rates(made))
    with pytest.raises(ValueError, match=r"accept_rate has shape \(1, 2, 4\)"):
        meter.update(terms, outputs=made, accept_rate=accept_rates(made)[:, 1:])
    with pytest.raises(AttributeError, match="confidence_pred"):
        meter.update(terms, outputs=object())
    assert meter.compute() == {}


def _reduced(rank: int, world_size: int) -> tuple[Reliability, Reliability]:
    made, meter = step(*STEPS[rank]), AcceptanceMeter(block_size=K)
    meter.update(terms_of(made), outputs=made)
    own = meter.reliability()
    meter.all_reduce()
    return own, meter.reliability()


def test_bins_add_up_over_ranks():
    steps = [step(*arguments) for arguments in STEPS]
    for rank, (own, together) in enumerate(run_ranks(_reduced, 2)):
        assert own.share != together.share
        assert_bins(together, steps)
        assert sum(own.share) == pytest.approx(1), rank


def _closed(rank: int, world_size: int) -> list[Tensor]:
    """Sums of three windows, and what is kept of them. Rank 1 sees no step in the second one; the
    third ends without an all_reduce."""
    meter = AcceptanceMeter(block_size=K)
    sums = []
    for window in range(3):
        terms = terms_of(step(window, 3 if rank == 0 or window != 1 else 0))
        if rank == 0 or window != 1:
            meter.update(terms)
        sums.append(meter.state_dict()["sums"])
        if window < 2:
            meter.all_reduce()
        meter.reset()
    return [*sums, *meter.state_dict()["windows"]]


def test_a_window_that_ends_is_kept_as_all_reduce_made_it():
    first, second = run_ranks(_closed, 2)
    for own, other in ((first, second), (second, first)):
        for window in range(2):
            assert torch.equal(own[3 + window], own[window] + other[window])
        assert torch.equal(own[5], own[2])
    assert not second[1].any(), "rank 1 has a step in the second window"


def test_a_checkpoint_carries_the_bins_and_the_windows(tmp_path):
    meter = metered()
    meter.reset()
    made = step(5, 4)
    meter.update(terms_of(made), outputs=made)
    torch.save(meter.state_dict(), tmp_path / "meter.pt")
    again = AcceptanceMeter(block_size=K)
    again.load_state_dict(torch.load(tmp_path / "meter.pt", weights_only=True))
    assert again.reliability() == meter.reliability()
    assert torch.equal(again.state_dict()["windows"], meter.state_dict()["windows"])
    assert len(again.state_dict()["windows"]) == 1


# --- The picture --------------------------------------------------------------------------------


@pytest.fixture
def needs_matplotlib():
    pytest.importorskip("matplotlib")


def texts(axes: Any) -> str:
    return " | ".join(text.get_text() for text in axes.texts)


@pytest.mark.usefixtures("needs_matplotlib")
def test_the_picture_shows_the_windows_from_first_to_last(tmp_path):
    meter, windows, tau = AcceptanceMeter(block_size=K), [(1, 9), (2, 5), (3, 30)], []
    for seed, anchors in windows:
        made = step(seed, anchors)
        meter.update(terms_of(made), outputs=made)
        last = meter.compute()
        tau.append(last["tau"])
        bins = meter.reliability()
        if seed != 3:
            meter.reset()
    figure = meter.plot(tmp_path / "acceptance.png")
    assert (tmp_path / "acceptance.png").stat().st_size > 10_000
    rates, over_time, calibration = figure.axes
    heights = [bar.get_height() for bar in rates.containers[1]]
    assert heights == pytest.approx([last[f"accept_rate@{k}"] for k in range(K)])
    labels = [text.get_text() for text in rates.get_legend().get_texts()]
    assert labels[0].startswith("window 1,") and labels[1].startswith("window 3,")
    assert over_time.lines[0].get_ydata() == pytest.approx(tau)
    assert list(over_time.lines[0].get_xdata()) == [1, 2, 3]
    points = calibration.collections[-1].get_offsets()
    assert points[:, 0].tolist() == pytest.approx(bins.predicted)
    assert points[:, 1].tolist() == pytest.approx(bins.measured)
    assert f"error {bins.expected_calibration_error:.3f}" in texts(calibration)


@pytest.mark.usefixtures("needs_matplotlib")
def test_after_the_last_reset_the_picture_is_that_of_the_windows_that_ended():
    meter = metered()
    during = meter.plot()
    meter.reset()
    after = meter.plot()
    for axes, others in zip(during.axes, after.axes):
        assert texts(axes) == texts(others)
    assert len(after.axes[1].lines[0].get_xdata()) == 1


@pytest.mark.usefixtures("needs_matplotlib")
def test_the_picture_says_what_is_missing():
    made = step(1, 6)
    meter = AcceptanceMeter(block_size=K)
    meter.update(terms_of(made))
    assert "update(terms, outputs=outputs)" in texts(meter.plot().axes[2])
    dropped = torch.zeros_like(made.block_keep_mask)
    meter = AcceptanceMeter(block_size=K)
    meter.update(terms_of(dataclasses.replace(made, block_keep_mask=dropped)))
    assert "no block was kept" in texts(meter.plot().axes[1])
    with pytest.raises(ValueError, match="nothing to plot"):
        AcceptanceMeter(block_size=K).plot()


def test_matplotlib_is_asked_for_when_it_is_needed_only(monkeypatch):
    meter = metered()
    right = builtins.__import__

    def missing(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError(name)
        return right(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"pip install 'dspark_ext\[metrics\]'"):
        meter.plot()


def test_importing_the_package_imports_neither_matplotlib_nor_torchmetrics():
    code = (
        "import sys, dspark_ext.metrics; print({'matplotlib', 'torchmetrics'} & set(sys.modules))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert printed.stdout.strip() == "set()", printed.stderr
