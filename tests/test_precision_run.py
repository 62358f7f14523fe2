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
    assert script.main(arguments) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    kept = json.loads(file.read_text())["25 steps"]
    assert len(kept) == 8 and len(kept["float32 kernel 0"]["curve"]) == 2
    for seed in "01":
        kernel, exact = (kept[f"float32 {judge} {seed}"] for judge in ("kernel", "float64"))
        assert kernel["loss"] == pytest.approx(exact["loss"], rel=1e-6)
        assert kernel["loss"] != kept[f"bfloat16 kernel {seed}"]["loss"]

    def no_more(path: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(script.target, "prepare", no_more)
    assert script.main(arguments) == 0
    assert capsys.readouterr().out == printed
    kept["bfloat16 kernel 1"]["curve"][1] += 1.0
    file.write_text(json.dumps({"25 steps": kept}))
    assert script.main(arguments) == 1


def test_one_seed_has_no_noise(script, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script.main([str(tmp_path / "runs.json"), "--seeds", "3"])
    assert "at least two" in capsys.readouterr().err
