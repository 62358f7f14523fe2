"""Every Python block of the README and of docs/ runs, and gives what the text around it says."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import itertools
import re
import sys
from typing import Optional

import documentation
import pytest
import torch
from conftest import load_file
from inputs import OBJECTIVE, outputs
from torch import nn

import dspark_ext
from dspark_ext import DSparkForwardOutput, DSparkLoss

pytestmark = pytest.mark.skipif(
    not (documentation.ROOT / "docs").is_dir(), reason="no source tree beside the tests"
)

B, A, K, V, H, R = 2, 3, 4, 33, 8, 2

# Pages whose blocks are executed elsewhere, where what they need is at hand.
ELSEWHERE = {
    "README.md": "tests/integrations/test_trainers.py",
    "docs/integrations.md": "tests/integrations/test_trainers.py",
    "docs/parallelism.md": "tests/test_data_parallel.py",
}


def test_every_page_with_python_is_executed_by_a_test():
    pages = [page for page in documentation.pages() if documentation.blocks(page)]
    source = (documentation.ROOT / "tests" / "test_docs.py").read_text()
    for page in pages:
        if page in ELSEWHERE:
            test = (documentation.ROOT / ELSEWHERE[page]).read_text()
            assert re.search(rf'documentation\.blocks\(\s*"{page}"', test), page
        else:
            assert re.search(rf'documentation\.run\(\s*"{page}"', source), page
    assert set(ELSEWHERE) <= set(pages)


def test_no_page_is_missing_from_the_site():
    listed = set(re.findall(r"(\w+\.md)", (documentation.ROOT / "mkdocs.yml").read_text()))
    assert listed == {page.split("/")[1] for page in documentation.pages() if "/" in page}


def test_links_between_pages_lead_somewhere():
    for page in documentation.pages():
        folder = (documentation.ROOT / page).parent
        text = (documentation.ROOT / page).read_text()
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(#[^)]*)?\)", text):
            file = folder / target if target else documentation.ROOT / page
            assert file.exists(), f"{page}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
                slugs = {
                    re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in headings
                }
                assert anchor[1:] in slugs, f"{page}: {target}{anchor}"


def test_both_pages_with_the_speed_table_have_the_same_one():
    figures = r"^\|.*?\| ([\d,.]+ \| [\d.]+ \| [\d.]+ % \| [\d,.]+ \| .* \|)$"
    tables = [
        re.findall(figures, (documentation.ROOT / page).read_text(), re.MULTILINE)
        for page in ("README.md", "docs/benchmarks.md")
    ]
    assert tables[0] == tables[1] and len(tables[0]) == 5


# --- The tests that pages name --------------------------------------------------------------------

MARKS = ("slow", "demo", "examples", "integrations", "cuda")


@functools.cache
def functions_of(file: str) -> dict[str, tuple[set[str], Optional[int]]]:
    """A file's functions: the marks that all of one's variants have, and its ``@examples``."""
    found = {}
    of_module: set[str] = set()
    for node in ast.parse((documentation.ROOT / file).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            values = node.value.elts if isinstance(node.value, ast.List) else [node.value]
            of_module = {ast.unparse(value).removeprefix("pytest.mark.") for value in values}
        if isinstance(node, ast.FunctionDef):
            decorators = {ast.unparse(d).removeprefix("pytest.mark.") for d in node.decorator_list}
            counts = [re.fullmatch(r"examples\((\d+)\)", d) for d in decorators]
            count = next((int(c[1]) for c in counts if c), None)
            found[node.name] = ((of_module | decorators) & set(MARKS), count)
    return found


def test_every_test_that_a_page_names_is_there():
    for page in documentation.pages():
        text = (documentation.ROOT / page).read_text()
        for file, name in re.findall(r"\b(tests/[\w/]+\.py)::(\w+)", text):
            assert name in functions_of(file), f"{page}: {file}::{name}"


def test_the_reliability_page_marks_each_test_as_it_is_marked():
    text = (documentation.ROOT / "docs" / "reliability.md").read_text()
    named = re.findall(r"(?:\*(\w+)\* )?`(tests/[\w/]+\.py)::(test_\w+)`", text)
    assert len(named) == text.count("::test_") > 100
    for mark, file, name in named:
        assert functions_of(file)[name][0] == {mark} - {""}, f"{file}::{name}"


def test_the_reliability_page_has_the_number_of_every_propertys_examples():
    file = "tests/test_properties.py"
    text = (documentation.ROOT / "docs" / "reliability.md").read_text()
    stated = dict(re.findall(rf"^\|.*`{file}::(\w+)` \| ([\d,]+) \|$", text, re.MULTILINE))
    counts = {name: count for name, (_, count) in functions_of(file).items() if count is not None}
    assert {name: int(count.replace(",", "")) for name, count in stated.items()} == counts


# --- The blocks ---------------------------------------------------------------------------------


class Toy(nn.Module):
    """A drafter whose batches are its outputs, times a parameter that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, batch: DSparkForwardOutput) -> DSparkForwardOutput:
        return dataclasses.replace(
            batch,
            draft_logits=batch.draft_logits * self.scale,
            confidence_pred=batch.confidence_pred * self.scale,
        )


def batches(count: int) -> list[DSparkForwardOutput]:
    return [outputs(i, (B, A, K, V), requires_grad=False) for i in range(count)]


def test_the_readmes_change_of_a_trainer_runs():
    made = outputs(1, (B, A, K, V))
    names = documentation.run("README.md", {"outputs": made}, "diff")
    assert made.draft_logits.grad.abs().sum() > 0
    assert names["terms"]["tau_den"] > 0


def test_the_start_page_runs():
    made = outputs(1, (B, A, K, V))
    names = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
    names["target_logits"] = names.pop("aligned_target_logits")
    found = documentation.run("docs/index.md", names)
    assert float(found["loss"].detach()) == pytest.approx(float(found["terms"]["loss"]), rel=1e-5)
    assert made.draft_logits.grad.abs().sum() > 0


def test_the_metrics_page_runs(tmp_path, monkeypatch, capsys):
    for module in ("matplotlib", "torchmetrics"):
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    logged: list[dict[str, float]] = []
    names = documentation.run(
        "docs/metrics.md",
        {
            "K": K,
            "torch": torch,
            "drafter": Toy(),
            "loss_fn": DSparkLoss(**OBJECTIVE),
            "loader": batches(50),
            "held_out": batches(3),
            "log": logged.append,
        },
    )
    assert len(logged) == 2
    for name, value in logged[0].items():
        assert logged[1][f"train/{name}"] == pytest.approx(value, rel=1e-5)
    documented = " ".join(
        re.findall(r"^\| (.*?) \|", (documentation.ROOT / "docs/metrics.md").read_text(), re.M)
    )
    for name in {*logged[0], *names["meter"].compute()}:
        assert f"`{re.sub('@.*', '@k', name)}`" in documented, name
    assert (tmp_path / "acceptance.png").stat().st_size > 10_000
    assert re.fullmatch(r"expected calibration error 0\.\d{3}\n", capsys.readouterr().out)


def test_the_page_about_hidden_states_runs():
    for language in ("diff", "python"):
        lm_head = nn.Linear(H, V, bias=False)
        made = outputs(1, (B, A, K, V))
        names = {
            **{field.name: getattr(made, field.name) for field in dataclasses.fields(made)},
            **vars(dspark_ext),
            "nn": nn,
            "V": V,
            "R": R,
            "lm_head": lm_head,
            "settings": OBJECTIVE,
            "draft_hidden": torch.randn(B, A, K, H, requires_grad=True),
            "target_hidden": torch.randn(B, A, K, H),
            "previous_ids": made.target_ids,
        }
        if language == "diff":
            documentation.run("docs/linear.md", names, "diff")
        else:
            names["outputs"] = dspark_ext.DSparkLinearOutput(
                names["draft_hidden"],
                lm_head.weight,
                made.target_ids,
                made.eval_mask,
                made.block_keep_mask,
                made.confidence_pred,
                target_hidden=names["target_hidden"],
            )
            documentation.run("docs/linear.md", names)
            loss = dspark_ext.compute_dspark_linear_loss(outputs=names["outputs"], **OBJECTIVE)
            loss.backward()
            assert names["projection"].weight.grad.abs().sum() > 0
        assert lm_head.weight.grad.abs().sum() > 0
        assert names["draft_hidden"].grad.abs().sum() > 0


def test_the_numerics_page_is_right():
    made = outputs(1, (B, A, K, V))
    names = documentation.run("docs/numerics.md", {"outputs": made, "settings": OBJECTIVE})
    assert names["error_here"] < 1e-5
    # Percents of some build of PyTorch, but always thousands of times ours.
    assert names["error_of_pytorch"] > max(1e-3, 1000 * names["error_here"])


def test_the_examples_page_shows_lines_of_the_examples(monkeypatch):
    examples = documentation.ROOT / "examples"
    (block,) = documentation.blocks("docs/examples.md")
    trainer = re.sub(r"\s+", "", (examples / "huggingface_trainer.py").read_text())
    for line in block.splitlines()[:2]:
        assert re.sub(r"\s+", "", line) in trainer
    monkeypatch.syspath_prepend(str(examples))
    synthetic = load_file(examples / "synthetic.py")
    windows = synthetic.Windows(8)
    names = documentation.run(
        "docs/examples.md",
        {
            "itertools": itertools,
            "epoch_iterator": iter(torch.utils.data.DataLoader(windows, batch_size=2)),
            "num_batches": 3,
            "align": dspark_ext.demo.drafter.align,
            "Batch": dspark_ext.demo.drafter.Batch,
            "BLOCK_SIZE": synthetic.BLOCK_SIZE,
            "SETTINGS": synthetic.SETTINGS,
            "loss_denominators": dspark_ext.loss_denominators,
        },
    )
    assert len(names["window"]) == 3 and float(names["denominators"]) > 0
    named = set(
        re.findall(r"`examples/(\w+\.py)`", (documentation.ROOT / "docs/examples.md").read_text())
    )
    assert named == {path.name for path in examples.glob("*.py")}


def test_every_public_name_is_on_the_api_page():
    text = (documentation.ROOT / "docs" / "api.md").read_text()
    listed = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    assert {f"dspark_ext.{name}" for name in dspark_ext.__all__} <= set(listed)
    for path in listed:
        module, _, name = path.rpartition(".")
        if path != "dspark_ext.metrics.AcceptanceMetric":  # needs torchmetrics
            assert hasattr(importlib.import_module(module), name), path
            assert getattr(sys.modules[module], name).__doc__, path
