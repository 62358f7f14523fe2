"""The benchmark's picture: what it measures for it, and that it shows every contender."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib", reason="matplotlib draws; the bench extra brings it")
pytest.importorskip("tabulate", reason="tabulate prints; the bench extra brings it")

from dspark_ext.__main__ import main
from dspark_ext.bench import plot
from dspark_ext.bench.problem import Problem


def test_the_sweep_ends_with_the_problem_itself_and_shrinks_one_size_at_a_time():
    problem = Problem(rows=448, vocab=151936)
    *smaller, last = plot.sweep(problem)
    assert last == problem
    assert [p.vocab for p in smaller if p.rows == 448] == [9496, 37984]
    assert [p.rows for p in smaller if p.vocab == 151936] == [28, 112]
    assert all(p.rows % 7 == 0 for p in smaller)


def test_the_picture_has_a_line_for_every_contender_and_the_floor(tmp_path, capsys, monkeypatch):
    drawn = []
    save = plot.plt.Figure.savefig
    monkeypatch.setattr(
        plot.plt.Figure,
        "savefig",
        lambda figure, *args, **kwargs: (drawn.append(figure), save(figure, *args, **kwargs)),
    )
    path = tmp_path / "bench.png"
    options = ["--rows", "28", "--vocab", "512", "--no-memory", "--contenders", "chunked", "plain"]
    assert main(["bench", *options, "--plot", str(path)]) == 0
    assert path.stat().st_size > 10_000
    assert str(path) in capsys.readouterr().out
    (figure,) = drawn
    time_v, time_n, *memory = figure.axes
    for axes in (time_v, time_n):
        assert len(axes.lines) == 4  # three contenders and the floor
        assert all(len(line.get_xdata()) == 3 for line in axes.lines)
    assert all(len(axes.lines) == 1 for axes in memory)  # the gradient alone: none was measured
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 5


def test_without_matplotlib_the_command_says_what_to_install(capsys, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "dspark_ext.bench.plot", None)
    monkeypatch.delattr("dspark_ext.bench.plot")
    assert main(["bench", "--rows", "7", "--vocab", "8", "--plot", "x.png"]) == 1
    assert "dspark_ext[bench]" in capsys.readouterr().err
