"""Whatever Python passes to a public name: an error that says what was wrong, and never a crash.

The calls are those of misuse.py, made in a process of their own: where it dies, the test fails
with the expression that makes the same call again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import misuse
import pytest
from conftest import TESTS

# How a way out is begun: what was expected, or what to do.
ADVICE = (
    "expected",
    "pass ",
    "use ",
    "Use ",
    "move ",
    "convert",
    "needs",
    "must ",
    "gather",
    "belong",
)
# Python's own words for what has no name of its own: a class that raises whatever it is asked, an
# array where a string is expected, more memory than there is.
OTHERS_WORDS = ("no placements here", "truth value of an array", "can't allocate memory")


def run_calls(function: str, folder: Path, *arguments: Any) -> Any:
    """What a function of misuse.py returns from a process of its own, if that lives."""
    notes = folder / "calls.txt"
    command = [sys.executable, str(TESTS / "misuse.py"), function]
    command += map(json.dumps, (*arguments, str(notes)))
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        call = notes.read_text().splitlines()[-1] if notes.exists() else "before the first call"
        pytest.fail(f"the process ended with {done.returncode} in {call}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", misuse.FUNCTIONS)
def test_each_wrong_argument_is_named_with_what_to_do_and_none_is_a_crash(name, tmp_path):
    errors = run_calls("one_at_a_time", tmp_path, name)
    assert len(errors) >= 20
    for argument, way, error in errors:
        call = f"misuse.call({name!r}, {argument!r}, {way}): {error}"
        assert not error.startswith("!"), call
        if any(words in error for words in OTHERS_WORDS):
            continue
        if (argument, int(way)) in misuse.EXEMPT:
            continue
        assert any(n in error for n in (argument, *misuse.ALIASES.get(argument, ()))), call
        assert any(words in error for words in ADVICE), call


def test_several_wrong_arguments_at_once_are_an_error_of_the_caller(tmp_path):
    assert run_calls("at_random", tmp_path, 1, 1500) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 10))
def test_thousands_of_wrong_calls_are_errors_of_the_caller(seed, tmp_path):
    assert run_calls("at_random", tmp_path, seed, 5000) == []


def test_the_references_building_blocks_do_not_crash(tmp_path):
    assert run_calls("reference_blocks", tmp_path) == []
