"""How a trainer's function is replaced and put back: checks first, then every name at once."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, Optional

Function = Callable[..., Any]


class IntegrationError(RuntimeError):
    """A trainer that cannot be patched; the message says what was found and what was expected."""


@dataclasses.dataclass(frozen=True)
class Target:
    """One function of a trainer.

    Attributes:
        module: the module that defines it.
        attribute: its name there, ``"function"`` or ``"Class.method"``.
        signature: its parameters as ``inspect`` prints them without annotations.
        make: builds the replacement from the original.
    """

    module: str
    attribute: str
    signature: str
    make: Callable[[Function], Function]

    @property
    def path(self) -> str:
        return f"{self.module}.{self.attribute}"


@dataclasses.dataclass(frozen=True)
class Integration:
    """What is known of one trainer.

    Attributes:
        name: what ``patch`` calls it.
        distribution: its name on the package index.
        package: the package that is imported.
        versions: the versions whose functions were compared with the replacements. Empty where
            no release has them, only the source repository: there the signature alone decides.
        layouts: alternative sets of targets, the first whose modules all exist is used.
    """

    name: str
    distribution: str
    package: str
    versions: tuple[str, ...]
    layouts: tuple[tuple[Target, ...], ...]


@dataclasses.dataclass(frozen=True)
class Trainer:
    """An installed trainer, as :func:`dspark_ext.integrations.available` found it.

    Attributes:
        name: what :func:`dspark_ext.integrations.patch` calls it.
        version: of its installed distribution; None where there is none (a source tree).
        problem: why ``patch`` would refuse it, None where it would not.
    """

    name: str
    version: Optional[str]
    problem: Optional[str]

    @property
    def patchable(self) -> bool:
        """Whether ``problem`` is None."""
        return self.problem is None


class Handle:
    """One use of a patch, as a value or as a context manager.

    Attributes:
        name (str): the trainer.
        replaced (tuple[str, ...]): dotted names of the functions that were replaced.
    """

    def __init__(self, name: str, installed: _Installed) -> None:
        self.name = name
        self.replaced = tuple(replacement.path for replacement in installed.replacements)
        self._installed: Optional[_Installed] = installed

    def undo(self) -> None:
        """Ends this use. The original functions come back with the last one of the trainer's
        uses, in whatever order they end; a second call does nothing."""
        installed, self._installed = self._installed, None
        if installed is not None:
            installed.release()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        state = "undone" if self._installed is None else "active"
        return f"<patch of {self.name}, {state}: {', '.join(self.replaced)}>"


def apply(integration: Integration) -> Handle:
    """Replaces the trainer's functions, or joins the replacement that is already in place.

    Raises:
        IntegrationError: see :func:`dspark_ext.integrations.patch`.
    """
    installed = _INSTALLED.get(integration.name)
    if installed is None:
        installed = _Installed(integration.name, _checked_replacements(integration))
        _INSTALLED[integration.name] = installed
    installed.uses += 1
    return Handle(integration.name, installed)


def find(integration: Integration) -> Optional[Trainer]:
    """The trainer as far as it shows without importing it; None where it is not installed."""
    if _file_of(integration.package) is None:
        return None
    return Trainer(integration.name, _version(integration), _problem(integration))


# --- Checks -------------------------------------------------------------------------------------


def _problem(integration: Integration) -> Optional[str]:
    """Why the trainer cannot be patched, from its files and metadata alone."""
    found = f"{integration.distribution} {_version(integration) or 'of unknown version'}"
    expected = " or ".join(integration.versions)
    if _file_of(integration.package) is None:
        wanted = f"expected {expected}" if expected else "expected a source checkout on sys.path"
        return f"found no package {integration.package}; {wanted}"
    if integration.versions and _version(integration) not in integration.versions:
        return f"found {found}; expected {expected}, the version whose functions are known"
    if _layout(integration) is None:
        missing = next(t.module for t in integration.layouts[0] if _file_of(t.module) is None)
        where = f"expected in {expected}" if expected else "which only its source repository has"
        return f"found {found} without the module {missing}, {where}"
    return None


def _version(integration: Integration) -> Optional[str]:
    try:
        return importlib.metadata.version(integration.distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _layout(integration: Integration) -> Optional[tuple[Target, ...]]:
    """The first set of targets whose modules exist."""
    for targets in integration.layouts:
        if all(_file_of(target.module) is not None for target in targets):
            return targets
    return None


def _file_of(module: str) -> Optional[Path]:
    """A module's file or a package's folder, found without importing anything."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # something in sys.modules that was not imported from a file
        return None
    if spec is None:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not rest:
        return folders[0] if folders else Path(spec.origin or top)
    for folder in folders:
        path = folder.joinpath(*rest)
        if path.is_dir():
            return path
        if path.with_suffix(".py").is_file():
            return path.with_suffix(".py")
    return None


def _checked_replacements(integration: Integration) -> list[_Replacement]:
    """The replacements, ready and not yet in place, when every function is the known one."""
    problem = _problem(integration)
    if problem is not None:
        raise IntegrationError(f"cannot patch {integration.name}: {problem}")
    replacements = []
    for target in _layout(integration) or ():
        owner, original = _resolve(integration, target)
        found = _signature(original)
        if found != target.signature:
            raise IntegrationError(
                f"cannot patch {integration.name}: found {target.path}{found}; expected "
                f"{target.path}{target.signature}"
            )
        replacements.append(_Replacement(target, owner, original))
    return replacements


def _resolve(integration: Integration, target: Target) -> tuple[Any, Function]:
    """The module or class that holds the function, and the function."""
    try:
        owner: Any = importlib.import_module(target.module)
    except Exception as error:  # an import of a large package fails in many ways
        raise IntegrationError(
            f"cannot patch {integration.name}: importing {target.module} failed with "
            f"{type(error).__name__}: {error}"
        ) from error
    *classes, attribute = target.attribute.split(".")
    for name in classes:
        owner = getattr(owner, name, None)
    original = vars(owner).get(attribute) if owner is not None else None
    if not callable(original):
        raise IntegrationError(
            f"cannot patch {integration.name}: found no function {target.path}; expected "
            f"{target.path}{target.signature}"
        )
    return owner, original


def _signature(function: Function) -> str:
    """A function's parameters without annotations, which change more often than their meaning."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return f", a {type(function).__name__} without a signature"
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


# --- Replacements in place ----------------------------------------------------------------------


class _Replacement:
    """One function's replacement.

    What is put in place is a switch between the two functions. References that nobody can find
    again (a default argument, another patch on top of this one) hold the switch, and get the
    original from it once the patch is undone.
    """

    def __init__(self, target: Target, owner: Any, original: Function) -> None:
        self.path = target.path
        self._owner = owner
        self._attribute = target.attribute.rpartition(".")[2]
        self._original = original
        self._active = False
        replacement = target.make(original)

        @functools.wraps(original)
        def switch(*args: Any, **kwargs: Any) -> Any:
            return (replacement if self._active else original)(*args, **kwargs)

        self._switch = switch

    def install(self) -> None:
        self._active = True
        self._exchange(self._original, self._switch)

    def remove(self) -> None:
        self._active = False
        self._exchange(self._switch, self._original)

    def _exchange(self, old: Function, new: Function) -> None:
        if vars(self._owner).get(self._attribute) is old:
            setattr(self._owner, self._attribute, new)
        for module, name in list(_names_of(old)):
            setattr(module, name, new)


def _names_of(function: Function) -> Iterator[tuple[types.ModuleType, str]]:
    """Every global name of every loaded module that stands for the function: re-exports, and
    what ``from ... import`` left in modules that use it."""
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType):
            for name, value in list(vars(module).items()):
                if value is function:
                    yield module, name


class _Installed:
    """A trainer's replacements in place, and how many handles want them there."""

    def __init__(self, name: str, replacements: list[_Replacement]) -> None:
        self.name = name
        self.replacements = replacements
        self.uses = 0
        for replacement in replacements:
            replacement.install()

    def release(self) -> None:
        self.uses -= 1
        if self.uses == 0:
            for replacement in self.replacements:
                replacement.remove()
            del _INSTALLED[self.name]


_INSTALLED: dict[str, _Installed] = {}
