"""How much of the package and of the kernels the tests execute, and what they do not.

``python scripts/coverage.py [--folder FOLDER] [PYTEST_ARGUMENT ...]`` builds the extension, and the
CUDA kernels for the host, with gcov's counters in a folder of its own, runs pytest over a copy of
the package there (by default the suite that ``pytest`` runs), and prints the shares and every line
that was not executed. It takes the `dev` and `test` extras and GCC.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Optional

from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
# Programs of their own, with their own builds.
WITHOUT = ("test_native.py", "test_wheel.py")
COUNTED = "--coverage -fprofile-abs-path"

SETTINGS = """
[run]
source_pkgs = dspark_ext
data_file = {folder}/python/data
parallel = true
patch = subprocess
concurrency = multiprocessing, thread
[report]
# The blocks of the documentation have no file.
ignore_errors = true
"""


def run(*command: object, cwd: Path, **environment: str) -> int:
    return subprocess.run(
        [*map(str, command)], cwd=cwd, env={**os.environ, **environment}
    ).returncode


def tool(name: str) -> str:
    """A program of this interpreter's environment, else of the machine."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        sys.exit(f"{name} is not installed; the `dev` and `test` extras hold what this takes")
    return found


def build(folder: Path) -> Path:
    """A copy of the package with a module that counts; the folder it can be imported from."""
    packages = folder / "packages"
    shutil.rmtree(packages, ignore_errors=True)
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "dspark_ext", packages / "dspark_ext", ignore=ignored)
    configure = [tool("cmake"), "-G", "Ninja", "-S", ROOT, "-B", folder / "module"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", f"-DPython_EXECUTABLE={sys.executable}"]
    configure += ["-DDSPARK_CUDA=off", f"-DCMAKE_CXX_FLAGS={COUNTED}"]
    configure += [f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={packages / 'dspark_ext'}"]
    for command in (configure, [tool("cmake"), "--build", folder / "module"]):
        if run(*command, cwd=folder) != 0:
            sys.exit("the module could not be built")
    return packages


def test(folder: Path, packages: Path, arguments: list[str]) -> int:
    """Runs pytest on the copy, in a folder from which the checkout's package is not imported."""
    settings = folder / "python" / "settings"
    settings.parent.mkdir(exist_ok=True)
    settings.write_text(SETTINGS.format(folder=folder))
    # Files of tests are named from where the script was called.
    arguments = [os.path.abspath(name) if Path(name).exists() else name for name in arguments]
    if not arguments:
        arguments = [str(TESTS), *(f"--ignore={TESTS / name}" for name in WITHOUT)]
    pytest = ["-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT]
    return run(
        *(sys.executable, "-m", "coverage", "run", f"--rcfile={settings}"),
        *(*pytest, "-p", "no:cacheprovider", "-q", *arguments),
        cwd=settings.parent,
        PYTHONPATH=str(packages),
        # What the tests build for themselves, the emulated kernels, is to count as well.
        CXXFLAGS=COUNTED,
        DSPARK_EMULATION_BUILD=str(folder / "emulated"),
    )


def ranges(lines: list[int]) -> str:
    """Numbers in order, neighbours joined: 3-5, 9."""
    groups: list[list[int]] = []
    for line in lines:
        if groups and line == groups[-1][1] + 1:
            groups[-1][1] = line
        else:
            groups.append([line, line])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in groups)


def report(title: str, files: dict[str, tuple[int, list[int]]]) -> None:
    """Prints executable and uncovered lines of files, and the share of all that is covered."""
    rows = [
        (name, total, f"{100 * (1 - len(missing) / total):.1f}", ranges(missing))
        for name, (total, missing) in sorted(files.items())
        if total > 0
    ]
    total = sum(total for total, _ in files.values())
    missing = sum(len(missing) for _, missing in files.values())
    print(f"\n{title}")
    headers = ("file", "lines", "%", "not executed")
    print(tabulate(rows, headers=headers, maxcolwidths=[None, None, None, 60]))
    print(f"{title}: {total - missing} of {total} lines, {100 * (1 - missing / total):.1f} %")


def python_files(folder: Path) -> dict[str, tuple[int, list[int]]]:
    settings, printed = folder / "python" / "settings", folder / "python.json"
    coverage = (sys.executable, "-m", "coverage")
    run(*coverage, "combine", "-q", f"--rcfile={settings}", cwd=settings.parent)
    if (
        run(*coverage, "json", "-q", f"--rcfile={settings}", "-o", printed, cwd=settings.parent)
        != 0
    ):
        sys.exit("no test imported the package")
    return {
        name.split(f"packages{os.sep}")[-1]: (
            found["summary"]["num_statements"],
            found["missing_lines"],
        )
        for name, found in json.loads(printed.read_text())["files"].items()
    }


def csrc_files(folder: Path, part: str) -> dict[str, tuple[int, list[int]]]:
    """Lines of csrc from the counters of one build; those of a template count once."""
    printed = folder / f"{part}.json"
    command = [sys.executable, "-m", "gcovr", "--root", ROOT, "--filter", ROOT / "csrc"]
    command += ["--merge-lines", "--exclude-throw-branches", "--json", printed]
    command += ["--gcov-ignore-parse-errors=negative_hits.warn", folder / part]
    if run(*command, cwd=folder) != 0:
        sys.exit("gcovr failed")
    files = {}
    for found in json.loads(printed.read_text())["files"]:
        hits: dict[int, int] = {}
        for line in found["lines"]:
            if not line.get("gcovr/excluded", False):
                number = line["line_number"]
                hits[number] = max(hits.get(number, 0), line["count"])
        files[found["file"]] = (len(hits), sorted(n for n, count in hits.items() if count == 0))
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--folder", type=Path, help="to build in; default: a temporary one")
    args, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder: Optional[Path] = args.folder
        folder = (folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        code = test(folder, build(folder), arguments)
        report("dspark_ext", python_files(folder))
        report("csrc, host", csrc_files(folder, "module"))
        if (folder / "emulated").exists():
            report("csrc, emulated device", csrc_files(folder, "emulated"))
    return code


if __name__ == "__main__":
    sys.exit(main())
