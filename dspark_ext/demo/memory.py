"""Peak memory of a training step from hidden states and from whole logits.

``python -m dspark_ext.demo.memory FILE`` is the process that measures it, on what
:func:`peak_growth_mib` wrote into the file.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

from dspark_ext.bench import peak
from dspark_ext.demo.target import Cache, Target
from dspark_ext.demo.train import Settings, make_drafter, objective, training_batches


def peak_growth_mib(target: Target, cache: Cache, settings: Settings) -> dict[str, float]:
    """MiB by which the run's first forward and backward pass raises a process's memory at its
    peak, from "hidden states" and from "logits".

    Raises:
        peak.Unmeasurable: this system does not tell.
        RuntimeError: the pass failed, or its process was killed.
    """
    peak.check_measurable("cpu")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step.pt"
        batch = next(training_batches(cache, settings))
        torch.save((target, batch, settings, torch.get_num_threads()), file)
        return peak.in_fresh_process("dspark_ext.demo.memory", str(file))


def main() -> None:
    """Answers with one line of JSON."""
    target, batch, settings, threads = torch.load(sys.argv[1], weights_only=False)
    torch.set_num_threads(threads)
    drafter = make_drafter(target, settings)

    def step() -> None:
        # A denominator of its own: in a data-parallel run the other ranks are elsewhere.
        loss, _ = objective(drafter(batch), settings.impl, torch.ones(()))
        loss.backward()

    growth = {}
    for name, linear in (("logits", False), ("hidden states", True)):
        drafter.linear = linear
        passes = []
        for _ in range(3):
            drafter.zero_grad()
            passes.append(peak.growth_mib(step, "cpu"))
        # What a pass happens to be the first to need, threads and libraries, is not its own.
        growth[name] = min(passes)
    print(json.dumps(growth))


if __name__ == "__main__":
    main()
