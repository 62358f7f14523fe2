"""Replacing a trainer's function: what is checked before, what is exchanged, what comes back."""

from __future__ import annotations

import importlib
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import dspark_ext
from dspark_ext import info, integrations
from dspark_ext.__main__ import main
from dspark_ext.integrations import IntegrationError, patching
from dspark_ext.integrations.patching import Integration, Target

# A trainer as small as one can be: a loss, two modules that hold its name, a method, and a
# function that keeps the loss as a default argument.
SOURCES = {
    "toytrainer/__init__.py": "from toytrainer.loss import weigh\n",
    "toytrainer/loss.py": """
        def weigh(values, *, scale: float = 1.0) -> float:
            "Adds up."
            return scale * sum(values)


        class Model:
            def terms(self, values, mask=None):
                return [values, mask]
    """,
    "toytrainer/core.py": """
        from toytrainer.loss import weigh
        from toytrainer import loss as loss_module


        def step(values):
            return weigh(values)


        def default(values, fn=weigh):
            return fn(values)


        def through_module(values):
            return loss_module.weigh(values)
    """,
    "toytrainer/late.py": "from toytrainer.loss import weigh as other_name\n",
    "toytrainer-1.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: toytrainer\nVersion: 1.2\n",
}

WEIGH = Target("toytrainer.loss", "weigh", "(values, *, scale=1.0)", lambda original: replaced)
TERMS = Target(
    "toytrainer.loss", "Model.terms", "(self, values, mask=None)", lambda original: replaced_method
)


def replaced(values: Any, *, scale: float = 1.0) -> float:
    return -scale * sum(values)


def replaced_method(self: Any, values: Any, mask: Any = None) -> str:
    return f"{type(self).__name__} replaced"


def toy(*targets: Target, **changes: Any) -> Integration:
    known = {
        "name": "toytrainer",
        "distribution": "toytrainer",
        "package": "toytrainer",
        "versions": ("1.2",),
        "layouts": (targets or (WEIGH, TERMS),),
    }
    return Integration(**{**known, **changes})


@pytest.fixture(autouse=True)
def trainer(tmp_path, monkeypatch):
    """The toy trainer on ``sys.path``; nothing of it stays loaded or patched."""
    for name, source in SOURCES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    assert patching._INSTALLED == {}
    for name in [name for name in sys.modules if name.partition(".")[0] == "toytrainer"]:
        del sys.modules[name]


def core() -> Any:
    return importlib.import_module("toytrainer.core")


def weigh_everywhere() -> list[float]:
    """The loss by each of the ways in which the trainer reaches it."""
    package, loss = (importlib.import_module(m) for m in ("toytrainer", "toytrainer.loss"))
    return [f([3]) for f in (core().step, core().default, core().through_module)] + [
        package.weigh([3]),
        loss.weigh([3]),
    ]


# --- Replacing and undoing ----------------------------------------------------------------------


def test_every_name_of_a_function_is_replaced_and_comes_back():
    # A default argument is no name: it keeps what it was bound to before the patch.
    assert weigh_everywhere() == [3, 3, 3, 3, 3]
    handle = patching.apply(toy())
    assert weigh_everywhere() == [-3, 3, -3, -3, -3]
    handle.undo()
    assert weigh_everywhere() == [3, 3, 3, 3, 3]


def test_a_patch_comes_before_or_after_the_import_of_what_uses_it():
    with patching.apply(toy()):
        assert weigh_everywhere() == [-3, -3, -3, -3, -3]
        late = importlib.import_module("toytrainer.late")
        assert late.other_name([3]) == -3
    assert weigh_everywhere() == [3, 3, 3, 3, 3]
    assert late.other_name is importlib.import_module("toytrainer.loss").weigh


def test_methods_are_replaced_on_their_class():
    model = importlib.import_module("toytrainer.loss").Model()
    with patching.apply(toy()):
        assert model.terms([1]) == "Model replaced"
    assert model.terms([1], mask=2) == [[1], 2]


def test_a_replacement_keeps_the_originals_name_and_signature():
    loss = importlib.import_module("toytrainer.loss")
    original = loss.weigh
    with patching.apply(toy()) as handle:
        assert loss.weigh is not original
        assert loss.weigh.__doc__ == "Adds up."
        assert loss.weigh.__module__ == "toytrainer.loss"
        assert handle.replaced == ("toytrainer.loss.weigh", "toytrainer.loss.Model.terms")
    assert loss.weigh is original


def test_a_replacement_can_hand_over_to_the_original():
    target = Target(
        "toytrainer.loss",
        "weigh",
        "(values, *, scale=1.0)",
        lambda original: lambda values, **keywords: 100 + original(values, **keywords),
    )
    with patching.apply(toy(target)):
        assert core().step([3]) == 103


def test_undoing_twice_does_nothing_more():
    first = patching.apply(toy())
    second = patching.apply(toy())
    first.undo()
    first.undo()
    assert core().step([3]) == -3
    second.undo()
    assert core().step([3]) == 3
    assert "undone" in repr(second) and "toytrainer" in repr(second)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_the_last_of_several_handles_brings_the_original_back(order):
    handles = [patching.apply(toy()) for _ in range(3)]
    for i, index in enumerate(order):
        assert core().step([3]) == -3, i
        handles[index].undo()
    assert core().step([3]) == 3


def test_an_inner_block_leaves_the_outer_patch_in_place():
    with patching.apply(toy()):
        with patching.apply(toy()):
            assert core().step([3]) == -3
        assert core().step([3]) == -3
    assert core().step([3]) == 3


def test_a_block_that_raises_is_undone():
    with pytest.raises(RuntimeError, match="in the block"), patching.apply(toy()):
        raise RuntimeError("in the block")
    assert core().step([3]) == 3


def test_another_patch_on_top_may_end_after_this_one():
    loss = importlib.import_module("toytrainer.loss")
    handle = patching.apply(toy())
    ours = loss.weigh
    loss.weigh = lambda values, **keywords: 1000 + ours(values, **keywords)
    assert core().through_module([3]) == 997
    handle.undo()
    assert core().through_module([3]) == 1003
    loss.weigh = ours  # what the other patch found when it came
    assert core().through_module([3]) == 3


def test_patching_again_after_undo_replaces_again():
    for _ in range(2):
        with patching.apply(toy()):
            assert core().step([3]) == -3
        assert core().step([3]) == 3


# --- Refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("integration", "message"),
    [
        (
            toy(versions=("1.3", "1.4")),
            r"found toytrainer 1\.2; expected 1\.3 or 1\.4, the version whose functions are known",
        ),
        (
            toy(distribution="toytrainer-nightly"),
            r"found toytrainer-nightly of unknown version; expected 1\.2",
        ),
        (
            toy(package="toytrainer_of_old"),
            r"found no package toytrainer_of_old; expected 1\.2",
        ),
        (
            toy(package="toytrainer_of_old", versions=()),
            r"found no package toytrainer_of_old; expected a source checkout on sys\.path",
        ),
        (
            toy(Target("toytrainer.losses", "weigh", "()", lambda original: replaced)),
            r"found toytrainer 1\.2 without the module toytrainer\.losses, expected in 1\.2",
        ),
        (
            toy(Target("toytrainer.losses", "f", "()", lambda original: replaced), versions=()),
            r"without the module toytrainer\.losses, which only its source repository has",
        ),
        (
            toy(WEIGH, Target("toytrainer.loss", "weight", "(values)", lambda original: replaced)),
            r"found no function toytrainer\.loss\.weight; expected toytrainer\.loss\.weight\(va",
        ),
        (
            toy(Target("toytrainer.loss", "Modell.terms", "(self)", lambda original: replaced)),
            r"found no function toytrainer\.loss\.Modell\.terms; expected",
        ),
        (
            toy(TERMS, Target("toytrainer.loss", "weigh", "(values)", lambda original: replaced)),
            r"found toytrainer\.loss\.weigh\(values, \*, scale=1\.0\); expected "
            r"toytrainer\.loss\.weigh\(values\)$",
        ),
        (
            toy(Target("toytrainer.loss", "weigh", "(values, *, scale=2.0)", lambda o: replaced)),
            r"found toytrainer\.loss\.weigh\(values, \*, scale=1\.0\); expected .*scale=2\.0\)",
        ),
    ],
)
def test_a_refusal_says_what_was_found_and_expected_and_changes_nothing(integration, message):
    assert core().step([3]) == 3
    with pytest.raises(IntegrationError, match=f"cannot patch toytrainer: .*{message}"):
        patching.apply(integration)
    assert weigh_everywhere() == [3, 3, 3, 3, 3]
    assert importlib.import_module("toytrainer.loss").Model().terms(1) == [1, None]


def test_a_trainer_that_cannot_be_imported_is_refused_with_its_error(trainer):
    (trainer / "toytrainer" / "loss.py").write_text("import nothing_of_that_name\n")
    (trainer / "toytrainer" / "__init__.py").write_text("")
    with pytest.raises(
        IntegrationError, match="importing toytrainer.loss failed with ModuleNotFoundError: No mod"
    ):
        patching.apply(toy())


def test_the_first_layout_whose_modules_exist_is_used():
    elsewhere = Target("toytrainer.ops.fused", "weigh", "()", lambda original: replaced)
    with patching.apply(toy(layouts=((elsewhere, WEIGH), (WEIGH,)))) as handle:
        assert handle.replaced == ("toytrainer.loss.weigh",)


def test_unknown_trainers_are_a_value_error_that_names_the_known_ones():
    with pytest.raises(ValueError, match=r"no trainer 'torchspec'.*'nemo_automodel', 'deepspec'"):
        integrations.patch("torchspec")


# --- What is there ------------------------------------------------------------------------------


@pytest.fixture
def known(monkeypatch) -> None:
    """Four trainers: as expected, of another version, without its module, and not installed."""
    trainers = [
        toy(),
        toy(name="newer", versions=("1.1",)),
        toy(Target("toytrainer.ops", "f", "()", lambda o: replaced), name="partial", versions=()),
        toy(name="absent", package="toytrainer_of_old"),
    ]
    monkeypatch.setattr(integrations, "_INTEGRATIONS", {t.name: t for t in trainers})


@pytest.mark.usefixtures("known")
def test_available_lists_what_is_installed_without_importing_it():
    found = {trainer.name: trainer for trainer in integrations.available()}
    assert list(found) == ["toytrainer", "newer", "partial"]
    assert "toytrainer" not in sys.modules
    assert [trainer.version for trainer in found.values()] == ["1.2"] * 3
    assert [trainer.patchable for trainer in found.values()] == [True, False, False]
    assert "expected 1.1" in found["newer"].problem
    assert "toytrainer.ops" in found["partial"].problem
    for name, trainer in found.items():
        if trainer.patchable:
            integrations.patch(name).undo()
        else:
            with pytest.raises(IntegrationError) as refusal:
                integrations.patch(name)
            assert trainer.problem in str(refusal.value)


@pytest.mark.usefixtures("known")
def test_info_lists_the_trainers(capsys):
    assert main(["info", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["trainers"]
    assert [trainer["name"] for trainer in listed] == ["toytrainer", "newer", "partial"]
    assert listed[0] == {"name": "toytrainer", "version": "1.2", "problem": None}
    assert "expected 1.1" in listed[1]["problem"]

    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert 'toytrainer 1.2: integrations.patch("toytrainer")' in text
    assert "newer: found toytrainer 1.2; expected 1.1" in " ".join(text.split())


def test_info_says_when_no_trainer_is_installed(monkeypatch, capsys):
    monkeypatch.setattr(integrations, "_INTEGRATIONS", {})
    assert info.collect()["trainers"] == []
    assert main(["info"]) == 0
    assert "none of those that dspark_ext.integrations knows" in capsys.readouterr().out


def test_every_known_trainer_is_in_the_documentation():
    text = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
    assert len(integrations._INTEGRATIONS) == 7
    for name, integration in integrations._INTEGRATIONS.items():
        assert f'dspark_ext.integrations.patch("{name}")' in text
        for version in integration.versions:
            assert f"{integration.distribution} {version}" in text
        for target in (target for layout in integration.layouts for target in layout):
            assert target.path in text, target.path
    assert dspark_ext.integrations.patch.__doc__.count('``"') == 7
