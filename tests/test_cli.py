"""The command line: ``python -m dspark_ext {info,bench}``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
import time
import types
from typing import Any

import pytest
import torch

from dspark_ext.__main__ import main
from dspark_ext.bench import cli, contenders, memory, peak, timing
from dspark_ext.bench.contenders import CONTENDERS, LINEAR_CONTENDERS, Unavailable
from dspark_ext.bench.problem import LOSS, Inputs, Problem

TINY = ["bench", "--rows", "14", "--vocab", "500", "--rounds", "5"]
FAST = ["--contenders", "ours", "torch", "chunked", "plain"]
LINEAR = ["--linear", "--hidden", "16"]

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def run_module(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dspark_ext", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=300,
    )


def assert_fits_terminal(text: str) -> None:
    assert [line for line in text.splitlines() if len(line) > 80] == []


# --- The parser ---------------------------------------------------------------------------------


def test_help_names_the_commands_without_importing_them(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "dspark_ext.demo.cli", raising=False)
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert_fits_terminal(text)
    for command in ("info", "bench", "demo"):
        assert command in text
    assert "dspark_ext.demo.cli" not in sys.modules


@pytest.mark.parametrize("arguments", [[], ["unknown"], ["info", "--unknown"]])
def test_unknown_commands_and_options_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "0"], "'0' is not a whole number of at least 1"),
        (["--linear", "--hidden", "0"], "'0' is not a whole number of at least 1"),
        (["--linear", "--head", "half"], "invalid choice: 'half'"),
        (["--vocab", "many"], "'many' is not a whole number"),
        (["--threads", "-1"], "'-1' is not a whole number"),
        (["--warm-up", "-1"], "'-1' is not a whole number of at least 0"),
        (["--rounds", "4"], "'4' is not a whole number of at least 5"),
        (["--inactive", "1.5"], "'1.5' is not a number from 0 to 1"),
        (["--inactive", "half"], "'half' is not a number from 0 to 1"),
        (["--inactive", "nan"], "'nan' is not a number from 0 to 1"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--contenders", "fastest"], "invalid choice: 'fastest'"),
        (["--json", "/nonexistent/result.json"], "not a file in an existing folder"),
    ],
)
def test_bench_explains_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["bench", *arguments])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_bench_refuses_an_in_place_gradient_in_evaluation(capsys):
    assert main([*TINY, "--evaluation", "--inplace"]) == 2
    assert "no gradient" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hidden", "16"], "--hidden and --head"),
        (["--head", "frozen"], "--hidden and --head"),
        (["--contenders", "logits"], "logits runs with --linear only"),
        ([*LINEAR, "--contenders", "torch"], "torch runs without --linear only"),
        ([*LINEAR, "--target-dtype", "bfloat16"], "leave --target-dtype"),
        ([*LINEAR, "--head", "trained", "--evaluation"], "no gradient that a head"),
        ([*LINEAR, "--inplace", "--evaluation"], "no gradient that could be written in place"),
    ],
)
def test_bench_refuses_options_of_the_other_start(arguments, message, capsys):
    assert main([*TINY, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_bench_says_when_the_inputs_do_not_fit(capsys):
    assert main([*TINY, "--vocab", str(2**50)]) == 1
    assert "The benchmark could not run: " in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_bench_says_when_there_is_no_gpu(capsys):
    assert main([*TINY, "--device", "cuda"]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_bench_names_the_extra_that_brings_tabulate(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tabulate", None)
    assert main(TINY) == 1
    assert "pip install 'dspark_ext[bench]'" in capsys.readouterr().err


# --- info ---------------------------------------------------------------------------------------


def test_info_fits_a_terminal_and_says_what_runs(capsys):
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert_fits_terminal(text)
    for expected in (torch.__version__, "CPU levels", "OpenMP", "CUDA kernels", "DSPARK_EXT_CHECK"):
        assert expected in text


def test_info_json_has_the_facts(capsys):
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["torch"] == torch.__version__
    assert facts["cpu"]["threads"] == torch.get_num_threads()
    assert facts["cpu"]["level"] in facts["cpu"]["levels"]
    assert facts["auto"]["cpu"]["implementation"] == "compiled kernel"
    assert len(facts["cuda"]["devices"]) == torch.cuda.device_count()
    assert "DSPARK_EXT_CPU_LEVEL" in facts["environment"]


@on_linux
def test_one_openmp_runtime_is_loaded():
    facts = json.loads(run_module("info", "--json").stdout)
    if facts["openmp"]["built"]:
        assert len(facts["openmp"]["runtimes"]) == 1


def test_info_reports_the_level_that_the_environment_chose():
    result = run_module("info", "--json", DSPARK_EXT_CPU_LEVEL="baseline")
    assert result.returncode == 0
    assert json.loads(result.stdout)["cpu"]["level"] == "baseline"


def test_info_explains_a_level_that_does_not_exist():
    result = run_module("info", DSPARK_EXT_CPU_LEVEL="quantum")
    assert result.returncode == 1
    assert_fits_terminal(result.stdout)
    assert "DSPARK_EXT_CPU_LEVEL=quantum" in result.stdout


# --- bench --------------------------------------------------------------------------------------


@pytest.fixture
def needs_tabulate():
    pytest.importorskip("tabulate")


def bench_json(tmp_path: Any, capsys: Any, *arguments: str) -> tuple[dict[str, Any], str]:
    """The JSON and the text of one benchmark in this process."""
    file = tmp_path / "bench.json"
    threads = torch.get_num_threads()
    try:
        assert main([*TINY, *arguments, "--json", str(file)]) == 0
    finally:
        torch.set_num_threads(threads)
    text = capsys.readouterr().out
    assert_fits_terminal(text)
    return json.loads(file.read_text()), text


@pytest.mark.usefixtures("needs_tabulate")
def test_bench_reports_every_contender(tmp_path, capsys):
    report, text = bench_json(tmp_path, capsys, *FAST, "--inplace", "--no-memory")
    assert report["problem"]["block_size"] == 7
    assert report["floor_bytes"] == 14 * 500 * 12
    assert report["copy_gb_per_s"] > 0
    assert (report["rounds"], report["warm_up"]) == (5, 1)
    assert report["first_call_ratio"] > 0
    assert report["machine"]["threads"] == torch.get_num_threads()
    names = [contender["name"] for contender in report["contenders"]]
    assert names == ["ours", "inplace", "torch", "chunked", "plain"]
    for contender in report["contenders"]:
        assert contender["status"] == "ok"
        assert len(contender["times_ms"]) == 5
        assert contender["min_ms"] <= contender["median_ms"]
        assert contender["ratio_to_ours"] > 0
        assert contender["floor_fraction"] > 0
        assert contender["name"] in text
        if contender["name"] != "ours":
            assert contender["agrees"] is True
            assert contender["gradient_error"] <= 1e-3


@pytest.mark.usefixtures("needs_tabulate")
def test_bench_options_reach_the_problem(tmp_path, capsys):
    report, text = bench_json(
        tmp_path,
        capsys,
        *("--contenders", "plain", "--no-memory", "--threads", "1", "--evaluation"),
        *("--dtype", "bfloat16", "--target-dtype", "float32", "--inactive", "0.5"),
    )
    assert report["machine"]["threads"] == 1
    assert report["problem"]["inactive_rows"] == 7
    assert report["floor_bytes"] == 7 * 500 * (2 + 4)
    assert [contender["gradient_error"] for contender in report["contenders"]] == [None, None]
    assert "no_grad" in text


@pytest.mark.usefixtures("needs_tabulate")
def test_bench_from_hidden_states_reports_every_contender(tmp_path, capsys):
    report, text = bench_json(
        tmp_path,
        capsys,
        *(*LINEAR, "--head", "trained", "--inplace", "--no-memory"),
        *("--contenders", "logits", "chunked", "plain"),
    )
    assert (report["problem"]["hidden"], report["problem"]["train_head"]) == (16, True)
    assert report["floor_flop"] == 4 * 2 * 14 * 500 * 16
    assert report["product_gflop_per_s"] > 0
    assert "hidden size 16, a trained head of 500 columns" in " ".join(text.split())
    names = [contender["name"] for contender in report["contenders"]]
    assert names == ["ours", "logits", "inplace", "chunked", "plain"]
    for contender in report["contenders"]:
        assert contender["status"] == "ok"
        assert len(contender["times_ms"]) == 5
        assert contender["floor_fraction"] > 0
        if contender["name"] != "ours":
            assert contender["agrees"] is True
            assert contender["gradient_error"] <= 1e-3


@pytest.mark.usefixtures("needs_tabulate")
def test_bench_options_reach_the_problem_from_hidden_states(tmp_path, capsys):
    report, text = bench_json(
        tmp_path,
        capsys,
        *(*LINEAR, "--contenders", "plain", "--no-memory", "--evaluation"),
        *("--dtype", "bfloat16", "--inactive", "0.5"),
    )
    assert report["problem"]["inactive_rows"] == 7
    assert report["floor_flop"] == 2 * 2 * 7 * 500 * 16
    assert [contender["gradient_error"] for contender in report["contenders"]] == [None, None]
    assert report["contenders"][1]["agrees"] is True
    assert "no_grad from hidden states" in " ".join(text.split())


@pytest.mark.parametrize("start", [[], LINEAR], ids=["logits", "hidden states"])
def test_an_evaluations_default_contenders_write_no_gradient_in_place(start):
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    args = parser.parse_args([*start, "--evaluation"])
    assert cli._complaint(args) is None
    assert "inplace" not in cli._chosen(args)


@on_linux
@pytest.mark.usefixtures("needs_tabulate")
def test_bench_measures_peak_memory_and_keeps_the_heap(tmp_path):
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("needs glibc")
    file = tmp_path / "bench.json"
    result = run_module(
        "bench", "--rows", "14", "--vocab", "50000", "--contenders", "plain",
        "--malloc", "keep", "--json", str(file),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert_fits_terminal(result.stdout)
    assert "glibc keeps its heap: MALLOC_MMAP_MAX_=0" in result.stdout
    report = json.loads(file.read_text())
    assert report["machine"]["allocator"]["MALLOC_MMAP_MAX_"] == "0"
    peaks = {contender["name"]: contender["peak_mib"] for contender in report["contenders"]}
    gradient = 14 * 50000 * 4 / 2**20
    assert peaks["plain"] > 3 * gradient
    assert gradient * 0.9 < peaks["ours"] < peaks["plain"]


@pytest.mark.usefixtures("needs_tabulate")
def test_failing_and_missing_contenders_are_listed_with_the_reason(tmp_path, capsys, monkeypatch):
    def fail(outputs):
        raise RuntimeError("out of luck")

    def missing():
        raise Unavailable("not installed")

    monkeypatch.setitem(CONTENDERS, "plain", contenders.Contender("fails", lambda: fail))
    monkeypatch.setitem(CONTENDERS, "nemo", contenders.Contender("is missing", missing))
    report, text = bench_json(
        tmp_path, capsys, "--no-memory", "--contenders", "chunked", "plain", "nemo"
    )
    status = {c["name"]: (c["status"], c["reason"]) for c in report["contenders"]}
    assert status["plain"] == ("failed", "out of luck")
    assert status["nemo"] == ("skipped", "not installed")
    assert status["chunked"] == ("ok", None)
    assert "failed: out of luck" in text
    assert "skipped: not installed" in text


@pytest.mark.usefixtures("needs_tabulate")
def test_a_contender_with_other_results_is_called_wrong(capsys, monkeypatch):
    monkeypatch.setitem(
        CONTENDERS,
        "plain",
        contenders.Contender("wrong", lambda: lambda o: 1.01 * contenders.plain_loss(o)),
    )
    assert main([*TINY, "--no-memory", "--contenders", "plain"]) == 1
    text = capsys.readouterr().out
    assert_fits_terminal(text)
    assert "WRONG RESULTS: plain" in text


def with_another_head_gradient(outputs: Any) -> torch.Tensor:
    head = 1.01 * outputs.lm_head_weight - 0.01 * outputs.lm_head_weight.detach()
    outputs = dataclasses.replace(outputs, lm_head_weight=head)
    return contenders.plain_loss(contenders.materialised(outputs))


def with_no_head_gradient(outputs: Any) -> torch.Tensor:
    outputs = dataclasses.replace(outputs, lm_head_weight=outputs.lm_head_weight.detach())
    return contenders.plain_loss(contenders.materialised(outputs))


@pytest.mark.usefixtures("needs_tabulate")
@pytest.mark.parametrize("loss", [with_another_head_gradient, with_no_head_gradient])
def test_the_gradient_of_a_trained_head_is_compared_too(loss, capsys, monkeypatch):
    monkeypatch.setitem(LINEAR_CONTENDERS, "plain", contenders.Contender("wrong", lambda: loss))
    arguments = [*TINY, *LINEAR, "--no-memory", "--contenders", "plain"]
    assert main([*arguments, "--head", "trained"]) == 1
    assert "WRONG RESULTS: plain" in capsys.readouterr().out
    assert main(arguments) == 0, "the gradient of the hidden states is right"


@on_linux
def test_from_hidden_states_ours_takes_less_memory_than_whole_logits():
    problem = Problem(rows=896, vocab=20000, hidden=16)
    threads = torch.get_num_threads()
    peaks = {name: memory.peak_growth_mib(name, problem, threads) for name in ("ours", "logits")}
    logits = 896 * 20000 * 4 / 2**20
    assert peaks["logits"] > 2.9 * logits
    assert peaks["ours"] < 1.1 * logits


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's
@pytest.mark.usefixtures("needs_tabulate")
@pytest.mark.parametrize("start", [[], LINEAR], ids=["logits", "hidden states"])
def test_the_compiled_contender_agrees(start, tmp_path, capsys):
    report, _ = bench_json(tmp_path, capsys, *start, "--contenders", "compile")
    compiled = report["contenders"][1]
    assert compiled["status"] == "ok", compiled["reason"]
    assert compiled["agrees"] is True


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
@pytest.mark.usefixtures("needs_tabulate")
def test_interrupting_a_benchmark_is_clean():
    process = subprocess.Popen(
        [sys.executable, "-m", "dspark_ext", *TINY, *FAST, "--no-memory", "--rounds", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts what it puts in the background with interrupts ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        for line in process.stderr:
            if line.startswith("round 2 "):
                break
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors


# --- The benchmark's parts ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 140 * 3 * 4),
        ({"dtype": "bfloat16", "target_dtype": "bfloat16"}, 140 * 6),
        ({"dtype": "bfloat16", "target_dtype": "bfloat16", "evaluation": True}, 140 * 4),
        ({"dtype": "float16", "target_dtype": "float16"}, 140 * 10),
        ({"inactive": 0.5}, 70 * 3 * 4 + 70 * 4),
    ],
)
def test_floor_counts_each_logit_and_gradient_once(options, expected):
    assert Problem(rows=14, vocab=10, **options).floor_bytes == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 14 * 3),
        ({"train_head": True}, 14 * 4),
        ({"evaluation": True}, 14 * 2),
        ({"inactive": 0.5}, 7 * 3),
    ],
)
def test_floor_from_hidden_states_counts_each_product_of_active_rows(options, expected):
    assert Problem(rows=14, vocab=10, hidden=6, **options).floor_flop == 2 * expected * 10 * 6


@on_linux
def test_the_growth_of_a_call_is_the_peak_of_what_it_allocates():
    def call() -> None:
        for _ in range(2):
            torch.ones(16 << 20, dtype=torch.float32)

    call()
    assert 60 < peak.growth_mib(call, "cpu") < 80


@on_linux
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="sets glibc's allocator")
def test_in_a_fresh_process_the_growth_is_exact_whatever_was_freed_before_and_during_the_call(
    tmp_path, monkeypatch
):
    (tmp_path / "freed.py").write_text(
        """
import json, torch
from dspark_ext.bench import peak

def call():
    for size in (12, 20):
        held = [torch.ones(size << 18) for _ in range(2)]
        del held[0]
        held = [torch.ones(size << 18)]

call()
grown = [peak.growth_mib(call, "cpu")]
for size in (30, 7, 24, 1):
    scattered = [torch.ones(size << 18) for _ in range(8)]
    del scattered[::2]
    grown.append(peak.growth_mib(call, "cpu"))
print(json.dumps(grown))
"""
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    assert peak.in_fresh_process("freed", "") == pytest.approx([52] * 5, abs=0.5)


def test_inputs_are_reproducible_and_survive_an_in_place_step():
    problem = Problem(rows=14, vocab=100, inactive=0.25)
    inputs, again = Inputs(problem), Inputs(problem)
    assert torch.equal(inputs.draft, again.draft)
    assert int((inputs.eval_mask == 0).sum()) == problem.inactive_rows
    runner = timing.Runner(CONTENDERS["inplace"], inputs)
    runner()
    assert inputs.gradient.data_ptr() == inputs.draft.data_ptr()
    runner.clean()
    assert torch.equal(inputs.draft, again.draft)
    assert inputs.gradient is None


def test_relative_l2_is_the_ratio_of_norms():
    reference = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    value = torch.tensor([[3.0, 0.0], [0.5, 4.0]])
    assert timing.relative_l2(value, reference) == pytest.approx(0.1)
    zeros = torch.zeros_like(reference)
    assert timing.relative_l2(zeros, zeros) == 0
    assert timing.relative_l2(reference, zeros) == float("inf")


def test_an_installed_trainer_gets_the_arguments_it_has(monkeypatch):
    seen = {}

    def compute_dspark_loss(*, outputs, loss_decay_gamma, ce_loss_alpha, extra=None):
        seen.update(loss_decay_gamma=loss_decay_gamma, ce_loss_alpha=ce_loss_alpha)
        return outputs.draft_logits.sum()

    _install_trainer(monkeypatch, compute_dspark_loss)
    inputs = Inputs(Problem(rows=7, vocab=10))
    CONTENDERS["nemo"].build()(inputs.outputs())
    assert seen == {name: LOSS[name] for name in ("loss_decay_gamma", "ce_loss_alpha")}


def test_a_trainer_with_other_arguments_is_unavailable(monkeypatch):
    _install_trainer(monkeypatch, lambda *, outputs, novelty: outputs)
    with pytest.raises(Unavailable, match="novelty"):
        CONTENDERS["nemo"].build()


def test_an_absent_trainer_is_unavailable(monkeypatch):
    monkeypatch.setitem(sys.modules, "nemo_automodel", None)
    with pytest.raises(Unavailable, match="cannot be imported"):
        CONTENDERS["nemo"].build()


def test_the_parts_of_liger_make_the_same_objective(monkeypatch):
    """With stand-ins of its functions' signatures; cross-entropy overwrites its logits."""

    def liger_cross_entropy(_input, target, reduction="mean"):
        assert reduction == "none"
        return torch.nn.functional.cross_entropy(_input, target, reduction=reduction)

    def liger_tvd(input, target, shift_labels=None, reduction="mean"):
        assert reduction == "none"
        return 0.5 * (input - target).abs()

    names = ["liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.functional"]
    for name in names:
        module = types.ModuleType(name)
        module.__path__ = []
        module.liger_cross_entropy, module.liger_tvd = liger_cross_entropy, liger_tvd
        monkeypatch.setitem(sys.modules, name, module)
    inputs = Inputs(Problem(rows=14, vocab=50))
    expected = CONTENDERS["plain"].build()(inputs.outputs())
    loss = CONTENDERS["liger"].build()(inputs.outputs())
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)


def test_an_absent_liger_is_unavailable(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(Unavailable, match="cannot be imported"):
        CONTENDERS["liger"].build()


def test_steps_of_a_gpu_are_timed_queued_and_apart(monkeypatch):
    class Event:
        clock = 0

        def record(self):
            Event.clock += 10
            self.at = Event.clock

        def elapsed_time(self, end):
            return end.at - self.at

    synchronised = []
    monkeypatch.setattr(timing, "_event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronised.append)
    steps = []

    def loss(outputs):
        assert not synchronised  # one wait, behind all of them
        steps.append(outputs)
        Event.clock += 100 if len(steps) == 1 else 1  # a slow first one does not count
        return outputs.draft_logits.sum()

    runner = timing.Runner(contenders.Contender("counts", lambda: loss), Inputs(Problem(7, 10)))
    assert runner._queued() == 11
    assert len(steps) == timing._QUEUED_STEPS and len(synchronised) == 1


def _install_trainer(monkeypatch: pytest.MonkeyPatch, loss: Any) -> None:
    parts = ["nemo_automodel", "components", "speculative", "dspark", "core"]
    for length in range(1, len(parts) + 1):
        module = types.ModuleType(".".join(parts[:length]))
        module.__path__ = []
        module.compute_dspark_loss = loss
        monkeypatch.setitem(sys.modules, module.__name__, module)


@on_linux
def test_a_process_that_runs_out_of_memory_is_a_failure_with_a_reason(monkeypatch):
    killed = subprocess.CompletedProcess([], -signal.SIGKILL, stdout="", stderr="")
    monkeypatch.setattr(peak.subprocess, "run", lambda *args, **kwargs: killed)
    with pytest.raises(RuntimeError, match="SIGKILL, most likely out of memory"):
        memory.peak_growth_mib("plain", Problem(), 1)


def test_the_heap_is_kept_by_starting_again_once(monkeypatch):
    calls = []
    monkeypatch.setattr(cli.os, "execve", lambda *arguments: calls.append(arguments))
    for name in cli.report.KEEP_HEAP:
        monkeypatch.delenv(name, raising=False)
    cli._reexecute_keeping_heap(["bench", "--malloc", "keep"])
    (path, command, environment), *others = calls
    assert not others
    assert path == sys.executable
    assert command[1:] == ["-m", "dspark_ext", "bench", "--malloc", "keep"]
    for name, value in cli.report.KEEP_HEAP.items():
        assert environment[name] == value
        monkeypatch.setenv(name, value)
    cli._reexecute_keeping_heap(["bench", "--malloc", "keep"])
    assert len(calls) == 1


def test_times_are_in_milliseconds():
    result, elapsed = timing.timed(lambda: time.sleep(0.02) or torch.ones(()), torch.device("cpu"))
    assert float(result) == 1
    assert 15 < elapsed < 2000


def test_a_problem_survives_the_way_to_another_process():
    problem = Problem(rows=14, vocab=50, dtype="bfloat16", inactive=0.5, seed=3)
    assert Problem(**json.loads(json.dumps(dataclasses.asdict(problem)))) == problem
