"""Peak memory growth of one step, each contender in a process of its own.

``python -m dspark_ext.bench.memory JSON`` is that process. It makes the inputs, runs a step of a
tiny size so that lazy imports and thread pools do not count, and prints by how much the peak of
one step of the real size lies above what was in use before.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import torch

from dspark_ext.bench import peak
from dspark_ext.bench.contenders import Unavailable, contenders_of
from dspark_ext.bench.problem import Inputs, Problem
from dspark_ext.bench.timing import Runner


def peak_growth_mib(name: str, problem: Problem, threads: int) -> float:
    """MiB above the inputs at the peak of one step, measured in a fresh process.

    Raises:
        Unavailable: the contender cannot run here.
        RuntimeError: the step failed, or the process was killed.
    """
    request = {"name": name, "problem": dataclasses.asdict(problem), "threads": threads}
    answer = peak.in_fresh_process("dspark_ext.bench.memory", json.dumps(request))
    if answer["status"] == "skipped":
        raise Unavailable(answer["reason"])
    if answer["status"] == "failed":
        raise RuntimeError(answer["reason"])
    return float(answer["peak_mib"])


def measure(name: str, problem: Problem) -> float:
    """MiB above the inputs at the peak of one step in this process."""
    contender = contenders_of(problem)[name]
    inputs = Inputs(problem)
    # A compiled function is compiled for its size, so only a step of that size warms it up.
    tiny = dataclasses.replace(problem, rows=14, vocab=64)
    warm_up = Runner(contender, inputs if contender.compiled else Inputs(tiny))
    warm_up()
    warm_up.clean()
    runner = warm_up if contender.compiled else Runner(contender, inputs)
    return peak.growth_mib(runner, problem.device)


def main() -> None:
    """Answers one request with one line of JSON."""
    request = json.loads(sys.argv[1])
    torch.set_num_threads(request["threads"])
    try:
        answer = {
            "status": "ok",
            "peak_mib": measure(request["name"], Problem(**request["problem"])),
        }
    except Unavailable as error:
        answer = {"status": "skipped", "reason": str(error)}
    except Exception as error:
        answer = {"status": "failed", "reason": str(error) or type(error).__name__}
    print(json.dumps(answer))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
