"""The code blocks of the README and of docs/, for the tests that execute them."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).parents[1]

# A fence, indented where it stands in a list, up to one with the same indentation.
_FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def pages() -> list[str]:
    """Every page of the documentation, as a path from the project's folder."""
    return ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def blocks(page: str, language: str = "python", section: Optional[str] = None) -> list[str]:
    """A page's code blocks in one language, or those below one ``##`` heading.

    Of a ``diff`` in Python the new side: what a reader is left with.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    if section is not None:
        text = dict(part.split("\n", 1) for part in text.split("\n## ")[1:])[section]
    found = [textwrap.dedent(body) for _, name, body in _FENCE.findall(text) if name == language]
    return [_new_side(block) for block in found] if language == "diff" else found


def run(page: str, names: dict[str, Any], language: str = "python") -> dict[str, Any]:
    """Executes a page's blocks, one after another in the same namespace, which is returned."""
    for i, block in enumerate(blocks(page, language)):
        exec(compile(block, f"{page}, {language} block {i + 1}", "exec"), names)
    return names


def _new_side(diff: str) -> str:
    return "".join(f"{line[1:]}\n" for line in diff.splitlines() if not line.startswith("-"))
