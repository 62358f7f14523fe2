"""One JSON file and one table of what scripts/gpu_check.sh measured.

``python scripts/gpu_table.py FOLDER`` reads the benchmark's results in the folder
(``bench_*.json``, ``evaluation_*.json``), writes ``gpu_check.json`` beside them and prints the
table.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tabulate import tabulate

# Milliseconds that the design is for, on an H200 with 8,192 rows of bfloat16: V, kind, target.
TARGETS = {
    (151936, "step"): 1.95,
    (151936, "evaluation"): 1.35,
    (128256, "step"): 1.65,
    (262144, "step"): 3.6,
}
COPY_SHARE = 0.85  # of the copy's rate, at least


def read(folder: Path) -> list[dict[str, Any]]:
    """The results in a folder, largest vocabulary last, steps before evaluations."""
    results = []
    for path in folder.glob("*_*.json"):
        result = json.loads(path.read_text(encoding="utf-8"))
        if "contenders" in result:
            result["kind"] = "evaluation" if result["problem"]["evaluation"] else "step"
            results.append(result)
    return sorted(results, key=lambda r: (r["kind"] != "step", r["problem"]["vocab"]))


def rows_of(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row of the table for each contender; ours with its target and verdict."""
    V, kind = result["problem"]["vocab"], result["kind"]
    rows = []
    for contender in result["contenders"]:
        name, median = contender["name"], contender["median_ms"]
        target = TARGETS.get((V, kind)) if name == "ours" else None
        verdict = ""
        if name == "ours" and median is not None:
            met = (target is None or median <= target) and contender["floor_fraction"] >= COPY_SHARE
            verdict = "met" if met else "MISSED"
        rows.append(
            (
                f"{V:,}" if name == "ours" else "",
                kind if name == "ours" else "",
                name,
                contender["status"] if median is None else f"{median:.2f}",
                "" if target is None else f"{target:.2f}",
                "" if median is None else f"{contender['floor_fraction']:.1%}",
                "" if median is None else f"{contender['ratio_to_ours']:.2f}",
                verdict,
            )
        )
    return rows


def main() -> int:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        print("usage: python scripts/gpu_table.py FOLDER", file=sys.stderr)
        return 2
    folder = Path(sys.argv[1])
    results = read(folder)
    if not results:
        print(f"no benchmark result in {folder}", file=sys.stderr)
        return 1
    (folder / "gpu_check.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    first = results[0]
    rates = sorted(result["copy_gb_per_s"] for result in results)
    print(f"{first['machine']['gpu']}, torch {first['machine']['torch']}; {first['rounds']} rounds")
    print(
        f"{first['problem']['rows']} rows, {first['problem']['dtype']}; a copy moves "
        f"{rates[0]:.0f} to {rates[-1]:.0f} GB/s read + written"
    )
    headers = ("V", "", "", "ms", "target", "of copy", "times ours", "")
    print(tabulate([row for result in results for row in rows_of(result)], headers=headers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
