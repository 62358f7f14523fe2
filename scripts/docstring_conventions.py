"""The docstrings' conventions in the site's terms: a griffe extension that mkdocs.yml names."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|class|meth|mod|attr):`([\w.]+)`")
# What stands indented behind ``::``.
_EXAMPLE = re.compile(r"::\n\n((?: {4}.*\n|\n(?= {4}))+)", re.MULTILINE)
# ``a, b: what they are`` in a section, with what follows further in; names may take two lines.
_SHARED = re.compile(r"^ {4}((?:\w+,\s+)+\w+): (.*\n?(?: {5,}.*\n?)*)", re.MULTILINE)


class Conventions(griffe.Extension):
    """Sphinx roles become cross-references, the ``::`` before an example a colon and a fence, and
    an entry of several parameters one for each."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites one docstring; names are looked up where they stand."""
        if obj.docstring is None:
            return

        def link(match: re.Match[str]) -> str:
            name = match[1]
            shown = name.removeprefix("dspark_ext.")
            if shown == name:
                first, *rest = name.split(".")
                try:
                    name = ".".join([obj.resolve(first), *rest])
                except griffe.NameResolutionError:  # of another package
                    return f"`{name}`"
            return f"[`{shown}`][{name}]"

        def fence(match: re.Match[str]) -> str:
            return f":\n\n```python\n{textwrap.dedent(match[1])}```\n"

        def split(match: re.Match[str]) -> str:
            description = match[2].rstrip("\n") + "\n"
            return "".join(f"    {name}: {description}" for name in re.split(r",\s+", match[1]))

        text = _ROLE.sub(link, obj.docstring.value)
        text = _EXAMPLE.sub(fence, text + "\n").rstrip("\n")
        obj.docstring.value = _SHARED.sub(split, text)
