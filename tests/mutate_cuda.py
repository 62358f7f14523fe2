"""Does every barrier in the CUDA kernels matter, and would a test notice its absence?

``python tests/mutate_cuda.py`` runs the kernels in the emulator once for each of their
synchronisations, with that one doing nothing, and prints what gave it away.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Callable, NamedTuple, Optional

import pytest
import torch
from accuracy import OPS, bf16
from emulated import ROOT, load
from gpu import emulate
from inputs import normal
from tabulate import tabulate
from torch import Tensor

SEEDS = range(12)
PRIMITIVES = (
    "block_barrier",
    "cluster_arrive",
    "cluster_wait",
    "fence_mbarrier_init",
    "mbarrier_arrive_expecting",
    "mbarrier_wait",
)


class Site(NamedTuple):
    """One call of a synchronising primitive."""

    file: str
    line: int
    primitive: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Detection(NamedTuple):
    """The first run that went wrong without a site."""

    workload: str
    seed: int
    symptom: str


def weighted(N: int, V: int, keep: int) -> Callable[[], list[Tensor]]:
    """The fused op over N rows, of which every ``keep``-th is inactive (none for 0)."""
    draft, target = (normal(seed, N, V).to(bf16) for seed in (1, 2))
    ids, ones = torch.arange(N) % V, torch.ones(N)
    active = torch.arange(N) % keep != keep - 1 if keep else None
    return lambda: list(OPS.weighted_fwd(draft, target, ids, active, ones, ones, True))


def ordered_sum() -> list[Tensor]:
    return [OPS.ordered_sum(normal(3, 1000, 2).float())]


WORKLOADS: dict[str, Callable[[], list[Tensor]]] = {
    "portable, 3 x 4097": weighted(3, 4097, 0),
    "row-resident, 7 x 49152": weighted(7, 49152, 4),
    "row-resident, 2500 x 16": weighted(2500, 16, 3),
    "ordered sum, 1000 x 2": ordered_sum,
}


def sites_in_sources() -> set[Site]:
    """Every call of a synchronising primitive in the kernels' files."""
    call = re.compile(rf"\b({'|'.join(PRIMITIVES)})\(")
    sites = set()
    for path in (ROOT / "csrc" / "cuda").glob("*.*"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code = line.split("//")[0]
            sites.update(Site(path.name, number, name) for name in call.findall(code))
    return sites


def executed_sites(emulator: ModuleType) -> set[Site]:
    """Those that the workloads execute."""
    for run in WORKLOADS.values():
        run()
    return {site for site in (Site(*s) for s in emulator.sites()) if site.primitive in PRIMITIVES}


def mutations(sites: set[Site]) -> list[tuple[Site, ...]]:
    """What is taken out at once: a site, or the two halves of a cluster's barrier."""
    joined = []
    for site in sorted(sites):
        if site.primitive == "cluster_wait":
            joined[-1] = (*joined[-1], site)
        else:
            joined.append((site,))
    return joined


def detect(
    emulator: ModuleType, mutation: tuple[Site, ...], expected: dict[str, list[Tensor]]
) -> Optional[Detection]:
    """How the workloads show that these sites do nothing; None where they do not."""
    emulator.skip([str(site) for site in mutation])
    try:
        for seed in SEEDS:
            for name, run in WORKLOADS.items():
                emulator.set_seed(seed)
                try:
                    results = run()
                except RuntimeError as error:
                    return Detection(name, seed, symptom_of(error))
                wrong = sum(not torch.equal(x, y) for x, y in zip(results, expected[name]))
                if wrong:
                    return Detection(name, seed, f"{wrong} of {len(results)} results differ")
    finally:
        emulator.skip([])
    return None


def symptom_of(error: RuntimeError) -> str:
    """What an emulation error says, without its places."""
    text = str(error).splitlines()[0].removeprefix("kernel ").split(": ", 1)[-1]
    return re.sub(r" (at|by) .*?(: |$)", r"\2", text)[:50]


def survey(emulator: ModuleType) -> dict[tuple[Site, ...], Optional[Detection]]:
    """Every mutation of what the workloads execute, with what gave it away."""
    sites = executed_sites(emulator)
    expected = {name: run() for name, run in WORKLOADS.items()}
    return {mutation: detect(emulator, mutation, expected) for mutation in mutations(sites)}


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:

        class Temporary:
            def getbasetemp(self) -> Path:
                return Path(folder)

        emulator = load("emulated_cuda", Temporary())  # type: ignore[arg-type]
        emulate(emulator, patch)
        found = survey(emulator)
    missed = [mutation for mutation, detection in found.items() if detection is None]
    rows = [
        (
            str(mutation[0]),
            " and ".join(site.primitive for site in mutation),
            *(detection or ("-", "-", "NOT NOTICED")),
        )
        for mutation, detection in found.items()
    ]
    print(tabulate(rows, headers=("without", "primitive", "shown by", "seed", "symptom")))
    print(f"{len(found) - len(missed)} of {len(found)} noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
