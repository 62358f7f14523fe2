"""The script that trains with the kernel and with float64 mathematics, on made-up text."""

from __future__ import annotations

import json
from types import ModuleType

import pytest
from conftest import load_file
from emulated import ROOT
from test_demo import made_up_text

pytest.importorskip("tqdm", reason="the demo extra brings it")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_file(ROOT / "scripts" / "precision_run.py")


def test_runs_are_compared_kept_and_not_repeated(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script.target, "target_file", lambda: "there")
    monkeypatch.setattr(script.target, "prepare", lambda path: (*made_up_text(), made_up_text()[1]))
    file = tmp_path / "runs.json"
    arguments = [str(file), "--steps", "25", "--seeds", "0", "1"]
    status = script.main(arguments)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    kept = json.loads(file.read_text())["25 steps"]
    assert len(kept) == 12 and len(kept["float32 kernel 0"]["curve"]) == 2
    for seed in "01":
        exact, kernel, nudged = (kept[f"float32 {by} {seed}"] for by in script.MATHEMATICS)
        assert kernel["loss"] == pytest.approx(exact["loss"], rel=1e-6)
        assert kernel["loss"] == pytest.approx(nudged["loss"], rel=1e-6)
        assert kernel != nudged
        assert kernel["loss"] != kept[f"bfloat16 kernel {seed}"]["loss"]

    def no_more(path: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(script.target, "prepare", no_more)
    assert script.main(arguments) == status
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    "off, rounding, status",
    [(0.0, 0.0, 0), (1e-3, 1e-3, 0), (1e-3, 1e-4, 1), (0.2, 0.2, 1)],
    ids=["equal", "as a rounding does", "more than a rounding does", "more than a seed does"],
)
def test_the_status_says_whether_kernel_and_float64_are_near(
    script, tmp_path, capsys, off, rounding, status
):
    def run(seed: int, by: str) -> dict[str, list[float]]:
        value = 1 + 0.1 * seed + {"kernel": off, "nudged": off + rounding}.get(by, 0.0)
        return {name: [value] for name in (*script.FIGURES, "curve")}

    runs = {f"{dtype} {by} {seed}": run(seed, by) for dtype, by in script.WAYS for seed in (0, 1)}
    file = tmp_path / "runs.json"
    file.write_text(json.dumps({"300 steps": runs}))
    assert script.main([str(file), "--seeds", "0", "1"]) == status
    line = next(x for x in capsys.readouterr().out.splitlines() if "loss curve" in x)
    printed = [float(cell) for cell in line.split("|")[3:7]]
    assert printed == pytest.approx([off, off, rounding, 0.1], rel=0.05)


def test_one_seed_has_no_noise(script, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script.main([str(tmp_path / "runs.json"), "--seeds", "3"])
    assert "at least two" in capsys.readouterr().err
