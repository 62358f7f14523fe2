"""AcceptanceMetric: the meter in torchmetrics' terms, with torchmetrics' own synchronisation."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from process_groups import run_ranks
from test_meter import K, step, terms_of

from dspark_ext import AcceptanceMeter

pytest.importorskip("torchmetrics")

from dspark_ext.metrics import AcceptanceMetric

STEPS = ((1, 1, 0.3), (2, 30, 0.9), (3, 5, 0.5))


def as_floats(quantities: dict[str, torch.Tensor]) -> dict[str, float]:
    assert all(value.shape == () for value in quantities.values())
    return {name: float(value) for name, value in quantities.items()}


def meter_of(steps: Any) -> AcceptanceMeter:
    meter = AcceptanceMeter(block_size=K)
    for made in steps:
        meter.update(terms_of(made), outputs=made)
    return meter


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_one_process_has_the_meters_quantities():
    steps = [step(*arguments) for arguments in STEPS]
    metric = AcceptanceMetric(block_size=K)
    for made in steps:
        metric.update(terms_of(made), outputs=made)
    meter = meter_of(steps)
    assert as_floats(metric.compute()) == pytest.approx(meter.compute(), rel=1e-6)
    assert metric.reliability() == meter.reliability()
    metric.reset()
    assert metric.compute() == {}


def test_forward_gives_the_steps_own_quantities_and_keeps_the_windows():
    steps = [step(*arguments) for arguments in STEPS]
    metric = AcceptanceMetric(block_size=K)
    for made in steps:
        own = metric(terms_of(made), outputs=made)
        assert as_floats(own) == pytest.approx(meter_of([made]).compute(), rel=1e-6)
    assert as_floats(metric.compute()) == pytest.approx(meter_of(steps).compute(), rel=1e-6)


def _synchronised(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 1 sees two steps of three, rank 0 the other one."""
    metric, meter = AcceptanceMetric(block_size=K), AcceptanceMeter(block_size=K)
    made = [step(*arguments) for arguments in STEPS]
    mine = made[:1] if rank == 0 else made[1:]
    for i in range(2):
        if i < len(mine):
            terms = terms_of(mine[i])
            metric.update(terms, outputs=mine[i])
            meter.update(terms, outputs=mine[i])
        else:
            terms_of(step(0, 0))  # every rank has to join in the loss
    own = meter.compute()
    meter.all_reduce()
    together = as_floats(metric.compute())
    with metric.sync_context():
        bins = metric.reliability()
        total = float(metric.sums.sum())
    return {
        "metric": together,
        "meter": meter.compute(),
        "own": own,
        "bins": bins,
        "total": total,
        "own total": float(metric.sums.sum()),
        "meter's bins": meter.reliability(),
        "own bins": metric.reliability(),
    }


def test_ranks_are_added_up_as_the_meter_adds_them():
    first, second = run_ranks(_synchronised, 2)
    assert first["metric"] == second["metric"]
    assert first["total"] == pytest.approx(first["own total"] + second["own total"])
    for found in (first, second):
        assert found["metric"] == pytest.approx(found["meter"], rel=1e-6)
        assert found["metric"]["tau"] != pytest.approx(found["own"]["tau"], rel=1e-3)
        assert found["bins"] == found["meter's bins"] != found["own bins"]


def _without_a_step(rank: int, world_size: int) -> dict[str, float]:
    metric = AcceptanceMetric(block_size=K)
    if rank == 0:
        metric.update(terms_of(step(2, 30), process_group=torch.distributed.new_group([0])))
    else:
        torch.distributed.new_group([0])
    return as_floats(metric.compute())


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_a_rank_that_saw_no_step_takes_part():
    first, second = run_ranks(_without_a_step, 2)
    assert first == second and first["tau"] > 1


def test_half_precision_modules_keep_the_sums_in_float64():
    module = torch.nn.Module()
    module.metric = AcceptanceMetric(block_size=K)
    module.to(torch.bfloat16)
    module.metric.update(terms_of(step(1, 6)))
    assert module.metric.sums.dtype == torch.float64


def test_a_copy_is_a_metric_of_its_own():
    metric = AcceptanceMetric(block_size=K)
    metric.update(terms_of(step(1, 6)))
    before = as_floats(metric.compute())
    copy.deepcopy(metric).update(terms_of(step(2, 6)))
    metric._computed = None
    assert as_floats(metric.compute()) == before


def test_block_sizes_are_checked():
    with pytest.raises(ValueError, match="block_size is 0"):
        AcceptanceMetric(block_size=0)
    with pytest.raises(TypeError, match="block_size is a float"):
        AcceptanceMetric(block_size=2.0)
    with pytest.raises(ValueError, match=f"block_size={K + 1}"):
        AcceptanceMetric(block_size=K + 1).update(terms_of(step(1, 3)))


def test_the_picture_is_the_meters(tmp_path):
    pytest.importorskip("matplotlib")
    made = step(1, 12)
    metric = AcceptanceMetric(block_size=K)
    metric.update(terms_of(made), outputs=made)
    figure = metric.plot(tmp_path / "acceptance.png")
    assert (tmp_path / "acceptance.png").stat().st_size > 10_000
    expected = meter_of([made]).plot()
    for axes, others in zip(figure.axes, expected.axes):
        assert [t.get_text() for t in axes.texts] == [t.get_text() for t in others.texts]


def test_a_missing_torchmetrics_is_named_with_the_command_that_installs_it(monkeypatch):
    import dspark_ext.metrics

    monkeypatch.delitem(sys.modules, "dspark_ext.acceptance_metric")
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    with pytest.raises(ImportError, match=r"pip install 'dspark_ext\[metrics\]'"):
        _ = dspark_ext.metrics.AcceptanceMetric
