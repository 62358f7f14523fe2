"""The command line: ``python -m dspark_ext {info,check,bench,demo}``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Optional

# command: (module with add_arguments(parser) and run(args) -> int, one line of help)
_COMMANDS = {
    "info": ("dspark_ext.info", "what was built and what will run"),
    "check": ("dspark_ext.check", "is this build right, on the devices that are here"),
    "bench": ("dspark_ext.bench.cli", "side-by-side timings against PyTorch implementations"),
    "demo": ("dspark_ext.demo.cli", "train a real drafter on real text, on this CPU"),
}


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Runs one command and returns its exit code (2: bad arguments, 130: interrupted)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = _parser(arguments).parse_args(arguments)
    args.command_line = arguments
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def _parser(arguments: list[str]) -> argparse.ArgumentParser:
    """The parser; only the module of the command that was asked for is imported."""
    from dspark_ext import __version__

    parser = argparse.ArgumentParser(
        prog="python -m dspark_ext",
        description="dspark_ext: the DSpark draft-model training objective for PyTorch.",
    )
    parser.add_argument("--version", action="version", version=f"dspark_ext {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, (module_name, summary) in _COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, description=summary[0].upper() + summary[1:] + "."
        )
        if name == asked:
            module = importlib.import_module(module_name)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
