"""The scripts for a GPU machine, as far as a machine without one can run them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from emulated import ROOT

SCRIPTS = ROOT / "scripts"


def contender(name: str, median: float, floor: float, ours: float) -> dict:
    return {
        "name": name,
        "status": "ok",
        "median_ms": median,
        "floor_fraction": floor / median,
        "ratio_to_ours": median / ours,
    }


def result(V: int, evaluation: bool, ours: float, floor: float) -> dict:
    return {
        "machine": {"gpu": "a GPU", "torch": "2.13.0"},
        "problem": {"rows": 8192, "vocab": V, "dtype": "bfloat16", "evaluation": evaluation},
        "rounds": 15,
        "copy_gb_per_s": 4300.0,
        "contenders": [
            contender("ours", ours, floor, ours),
            {"name": "liger", "status": "skipped", "median_ms": None},
            contender("plain", 10 * ours, floor, ours),
        ],
    }


def test_the_table_judges_ours_by_target_and_copy_rate(tmp_path):
    results = {
        "bench_151936": result(151936, False, 1.9, 1.74),
        "bench_262144": result(262144, False, 3.7, 3.0),
        "evaluation_151936": result(151936, True, 1.3, 1.0),
    }
    for name, value in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    command = [sys.executable, str(SCRIPTS / "gpu_table.py"), str(tmp_path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert max(map(len, printed.splitlines())) <= 80
    verdicts = {
        (line.split()[0], line.split()[1]): line.split()[-1]
        for line in printed.splitlines()
        if " ours " in line and "%" in line
    }
    assert verdicts == {
        ("151,936", "step"): "met",
        ("262,144", "step"): "MISSED",  # later than its target
        ("151,936", "evaluation"): "MISSED",  # slower than 85 % of the copy
    }
    assert "skipped" in printed
    saved = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [r["problem"]["vocab"] for r in saved] == [151936, 262144, 151936]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: run the script itself")
def test_the_check_says_that_there_is_no_gpu_and_builds_nothing(tmp_path):
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    done = subprocess.run(
        ["bash", str(SCRIPTS / "gpu_check.sh"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": sys.executable},
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert "torch sees no CUDA GPU" in done.stderr
    assert not list((tmp_path / "out").iterdir())


def test_every_file_with_tests_for_a_gpu_is_in_the_check():
    marks = re.compile(r"mark\.cuda|^from gpu import .*\bgpu\b", re.MULTILINE)
    files = [p for p in (ROOT / "tests").glob("test_*.py") if marks.search(p.read_text())]
    script = (SCRIPTS / "gpu_check.sh").read_text()
    assert len(files) > 2 and not [p.name for p in files if f"tests/{p.name}" not in script]


def test_the_steps_of_the_check_are_options_that_exist():
    """Every benchmark option that the script passes is one that the command declares."""
    script = (SCRIPTS / "gpu_check.sh").read_text()
    command = [sys.executable, "-m", "dspark_ext", "bench", "--help"]
    known = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path.cwd())
    for option in ("device", "rows", "vocab", "dtype", "rounds", "no-memory", "contenders", "json"):
        assert f"--{option}" in script and f"--{option}" in known.stdout
    for name in ("recompute", "inplace", "chunked", "plain", "compile", "liger"):
        assert name in script and name in known.stdout
