"""The oracle itself, against hand-computed rows and PyTorch's own float64 autograd."""

import math

import oracle
import pytest
import torch
from conftest import relative_error
from inputs import normal


def rows(p: list[float], q: list[float]) -> tuple[oracle.Softmax, oracle.Softmax]:
    return tuple(oracle.softmax(torch.tensor(x, dtype=torch.float64).log()) for x in (p, q))


def test_a_row_of_two_columns_by_hand():
    draft, target = rows([1 / 4, 3 / 4], [1 / 2, 1 / 2])
    assert oracle.cross_entropy(draft, 0) == pytest.approx(math.log(4))
    assert oracle.cross_entropy(draft, 1) == pytest.approx(math.log(4 / 3))
    assert oracle.cross_entropy_gradient(draft, 1).tolist() == pytest.approx([0.25, -0.25])
    assert oracle.l1_distance(draft, target) == pytest.approx(0.5)
    assert oracle.signed_mass(draft, target).s == pytest.approx(0.5)
    assert oracle.l1_gradient(draft, target).tolist() == pytest.approx([-0.375, 0.375])


def test_a_tie_takes_the_third_sign():
    draft, target = rows([1 / 4, 1 / 4, 1 / 2], [1 / 4, 1 / 2, 1 / 4])
    # Signs 0, -1, +1, hence S = 1/4 and p (s - S) = -1/16, -5/16, 6/16.
    assert oracle.l1_gradient(draft, target).tolist() == pytest.approx([-1 / 16, -5 / 16, 6 / 16])


@pytest.mark.parametrize("seed", range(4))
def test_rows_agree_with_autograd(seed):
    x, t = normal(seed, 50, scale=2).requires_grad_(), normal(seed + 100, 50, scale=2)
    ce = torch.nn.functional.cross_entropy(x[None], torch.tensor([seed]))
    l1 = (x.softmax(0) - t.softmax(0)).abs().sum()
    (ce_gradient,) = torch.autograd.grad(ce, x)
    (l1_gradient,) = torch.autograd.grad(l1, x)
    draft, target = oracle.softmax(x.detach()), oracle.softmax(t)
    assert oracle.cross_entropy(draft, seed) == pytest.approx(ce.item(), rel=1e-13)
    assert oracle.l1_distance(draft, target) == pytest.approx(l1.item(), rel=1e-13)
    assert relative_error(oracle.cross_entropy_gradient(draft, seed), ce_gradient) < 1e-14
    assert relative_error(oracle.l1_gradient(draft, target), l1_gradient) < 1e-13
