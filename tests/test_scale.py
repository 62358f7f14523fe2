"""The script that compares sizes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from emulated import ROOT


def test_the_table_has_a_line_for_each_size():
    command = [sys.executable, str(ROOT / "scripts" / "scale.py"), "--rounds", "1", "--vocab", "50"]
    command += ["--rows", "8", "16", "--columns", "40", "60", "70", "--positions", "24"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    sizes = [(row[0], row[1]) for row in cells if row[0].isdigit()]
    assert sizes == [("8", "50"), ("16", "50"), ("24", "40"), ("24", "60"), ("24", "70")]
    for row in cells:
        if row[0].isdigit():
            pairs = int(row[0]) * int(row[1])
            assert float(row[3]) * pairs / 1e6 == pytest.approx(float(row[2]), abs=0.06)
    assert [row[5] for row in cells if row[0].isdigit()][1::3] == ["1.00", "1.00"]
