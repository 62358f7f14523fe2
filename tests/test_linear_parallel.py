"""The objective from hidden states over ranks, each a process: batches, windows, vocabularies.

Expected values come from one process with the joined batch and the whole heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import pytest
import torch
import torch.distributed as dist
from conftest import relative_error
from process_groups import CollectiveCounter, run_ranks
from test_linear import (
    SETTINGS,
    Case,
    Problem,
    Result,
    fused,
    gradients_of,
    linear_output,
    materialised,
    problem,
)
from test_linear import V as VOCABULARY
from torch import Tensor, nn

from dspark_ext import compute_dspark_linear_loss, loss_denominators

f32, bf16, f64 = torch.float32, torch.bfloat16, torch.float64
# Products of fewer rows or columns are added up in another order. In bf16 a gradient of logits and
# a result are rounded on either side, and four independent roundings add up to some 2**-8.
TOLERANCES = {f32: 1e-6, f64: 1e-12, bf16: 2.0**-7}
ROWS = ("hidden", "confidence")  # leaves with a position in the batch


def assert_close(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    assert actual.shape == expected.shape, f"{what}: {actual.shape} for {expected.shape}"
    error = relative_error(actual, expected)
    assert error <= tolerance, f"{what}: relative error {error:.3g}"


def step(made: Problem, outputs: Optional[Any] = None, **options: Any) -> dict[str, Any]:
    """Loss, terms and gradients of leaves that are this rank's own."""
    outputs = linear_output(made) if outputs is None else outputs
    loss, terms = compute_dspark_linear_loss(
        outputs=outputs, return_terms=True, **{**SETTINGS, **options}
    )
    return {"loss": loss.detach(), "terms": terms, "gradients": gradients_of(loss, made)}


# --- Data parallel -------------------------------------------------------------------------------

SPLITS = {
    "uneven": (1, 7),
    "an empty rank": (0, 5),
    "one rank": (6,),
    "three ranks": (4, 0, 2),
}
CASES = {
    "trained heads": Case(),
    "frozen heads": Case("gated", None, False, "tied", False),
    "given logits": Case("rnn", 4.0, False, "strided"),
}


def joined(case: Case, split: tuple, dtype: torch.dtype = f32, unsupervised: int = -1) -> Problem:
    """The batch of all ranks; nothing is supervised in the anchors of one of them."""
    made = problem(case, dtype, 5, (2, sum(split), 5))
    if unsupervised >= 0:
        made.constants["eval_mask"][:, anchors_of(split, unsupervised)] = False
    return made


def anchors_of(split: tuple, rank: int) -> slice:
    return slice(sum(split[:rank]), sum(split[: rank + 1]))


def share(whole: Problem, anchors: slice) -> Problem:
    """Some anchors of a batch, with the whole heads."""
    shape = whole.constants["ids"].shape
    leaves, constants = (
        {n: t[:, anchors] if t.shape[:2] == shape[:2] else t for n, t in tensors.items()}
        for tensors in (whole.leaves, whole.constants)
    )
    return Problem(whole.case, leaves, constants).fresh()


def assert_ranks_are_the_joined_batch(
    ranks: list[dict], split: tuple, expected: Result, tolerance: float, mean: bool = True
) -> None:
    divisor = len(split) if mean else 1
    total = sum(made["loss"].double() for made in ranks) / divisor
    assert_close(total, expected.loss, tolerance, "loss")
    for name, value in expected.gradients.items():
        shares = [made["gradients"][name].double() / divisor for made in ranks]
        actual = torch.cat(shares, dim=1) if name in ROWS else sum(shares)
        assert_close(actual, value, tolerance, f"gradient of {name}")


def _data_parallel(rank: int, world_size: int, split: tuple, variants: list) -> list[dict]:
    results = []
    for case, dtype, unsupervised, options in variants:
        whole = joined(case, split, dtype, unsupervised)
        results.append(step(share(whole, anchors_of(split, rank)), chunk_rows=7, **options))
    return results


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_uneven_ranks_have_the_gradient_of_the_joined_batch(split):
    variants = [
        (case, dtype, unsupervised, {"impl": impl, "grad_reduction": reduction})
        for case in CASES.values()
        for dtype, impl, reduction in (
            (f32, "kernel", "mean"),
            (f32, "torch", "sum"),
            (f64, "kernel", "sum"),
            (bf16, "kernel", "mean"),
        )
        for unsupervised in (-1, len(split) - 1)
    ]
    by_rank = run_ranks(_data_parallel, len(split), split, variants)
    for i, (case, dtype, unsupervised, options) in enumerate(variants):
        whole = joined(case, split, dtype, unsupervised)
        expected = fused(whole, impl=options["impl"], chunk_rows=7)
        is_mean = options["grad_reduction"] == "mean"
        ranks = [made[i] for made in by_rank]
        try:
            assert_ranks_are_the_joined_batch(ranks, split, expected, TOLERANCES[dtype], is_mean)
        except AssertionError as error:
            pytest.fail(f"{split} {variants[i]}: {error}")


def _window(rank: int, world_size: int, windows: tuple) -> dict[str, Any]:
    """The sums over this rank's micro-batches of one optimizer step."""
    split = sum(windows, ())
    whole = joined(Case(), split)
    first = sum(len(window) for window in windows[:rank])
    parts = [share(whole, anchors_of(split, first + i)) for i in range(len(windows[rank]))]
    denominators = loss_denominators([p.constants["eval_mask"] for p in parts], 4.0)
    steps = [step(p, denominators=denominators, chunk_rows=7) for p in parts]
    gradients = {
        name: torch.cat(values, dim=1) if name in ROWS else sum(values)
        for name in steps[0]["gradients"]
        for values in [[made["gradients"][name] for made in steps]]
    }
    return {"loss": sum(made["loss"] for made in steps), "gradients": gradients}


@pytest.mark.parametrize("windows", [((3, 1, 2),), ((3, 1), (2, 4)), ((2,), (1, 3, 2))], ids=str)
def test_micro_batches_of_a_window_have_the_gradient_of_the_joined_batch(windows):
    whole = joined(Case(), sum(windows, ()))
    ranks = run_ranks(_window, len(windows), windows)
    split = tuple(sum(window) for window in windows)
    assert_ranks_are_the_joined_batch(ranks, split, materialised(whole), TOLERANCES[f32])


# --- Vocabulary parallel -------------------------------------------------------------------------


class Shard(NamedTuple):
    """Columns ``[start, stop)`` in a weight of ``size`` rows, the rest of which are NaN."""

    start: int
    stop: int
    size: int
    arguments: dict

    def cut(self, whole: Tensor, dim: int = 0) -> Tensor:
        real = whole.narrow(dim, self.start, self.stop - self.start)
        shape = list(whole.shape)
        shape[dim] = self.size - (self.stop - self.start)
        return torch.cat([real, whole.new_full(shape, torch.nan)], dim).contiguous()


def shards(layout: str, world_size: int) -> list[Shard]:
    if layout == "padded":
        piece = -(-VOCABULARY // world_size)
    elif layout == "padded to ranks without a column":
        piece = -(-VOCABULARY // (world_size - 1))
    else:
        bounds = {
            ("uneven", 2): (0, 20, 33),
            ("uneven", 3): (0, 5, 30, 33),
            ("a rank without a column", 3): (0, 17, 17, 33),
            ("equal", 3): (0, 11, 22, 33),
        }[layout, world_size]
        return [
            Shard(a, b, b - a, {} if layout == "equal" else {"vocab_start": a})
            for a, b in zip(bounds, bounds[1:])
        ]
    bounds = [min(piece * i, VOCABULARY) for i in range(world_size + 1)]
    return [Shard(a, b, piece, {"vocab_size": VOCABULARY}) for a, b in zip(bounds, bounds[1:])]


HEADS = ("weight", "bias", "markov_weight")


def cut(whole: Problem, shard: Shard) -> Problem:
    """This rank's rows of every head, and its columns of given logits."""
    leaves = {n: shard.cut(t) if n in HEADS else t for n, t in whole.leaves.items()}
    constants = dict(whole.constants)
    for name in ("target_weight", "target_bias"):
        if name in constants:
            constants[name] = shard.cut(constants[name])
    if "target_logits" in constants:
        constants["target_logits"] = shard.cut(constants["target_logits"], dim=-1)
    return Problem(whole.case, leaves, constants).fresh()


def _vocabulary_parallel(rank: int, world_size: int, variants: list) -> list[dict]:
    results = []
    for case, dtype, layout, options in variants:
        shard = shards(layout, world_size)[rank]
        made = cut(problem(case, dtype), shard)
        keywords = dict(tp_group=dist.group.WORLD, chunk_rows=6, **shard.arguments)
        results.append(step(made, **{**keywords, **options}))
    return results


def assert_shards_are_the_whole(
    ranks: list[dict], layout: str, expected: Result, tolerance: float
) -> None:
    """Equal bits on all ranks of what is not sharded, and the single process's values."""
    for rank, made in enumerate(ranks):
        assert torch.equal(made["loss"], ranks[0]["loss"]), f"loss of rank {rank}"
        for name, term in made["terms"].items():
            assert torch.equal(term, ranks[0]["terms"][name]), f"{name} of rank {rank}"
            close = torch.allclose(term, expected.terms[name], rtol=tolerance, atol=tolerance)
            assert close, f"{name}: {term.tolist()} for {expected.terms[name].tolist()}"
    assert_close(ranks[0]["loss"], expected.loss, tolerance, "loss")
    for name, value in expected.gradients.items():
        parts = [made["gradients"][name] for made in ranks]
        if name not in HEADS:
            for rank, part in enumerate(parts):
                assert torch.equal(part, parts[0]), f"gradient of {name} of rank {rank}"
            assert_close(parts[0], value, tolerance, f"gradient of {name}")
            continue
        cuts = shards(layout, len(ranks))
        columns = [shard.stop - shard.start for shard in cuts]
        real = torch.cat([part[:n] for part, n in zip(parts, columns)])
        assert_close(real, value, tolerance, f"gradient of {name}")
        for rank, (part, n) in enumerate(zip(parts, columns)):
            assert (part[n:] == 0).all(), f"gradient of {name}'s padding on rank {rank}"


VARIANTS = [
    (Case(), f32, {"impl": "kernel"}),
    (Case(), f32, {"impl": "torch"}),
    (Case(), f64, {"impl": "kernel", "chunk_rows": 1}),
    (Case(), bf16, {"impl": "kernel"}),
    (Case("gated", None, False, "tied", False), f32, {"impl": "kernel", "chunk_rows": None}),
    (Case("rnn", 4.0, False, "contiguous"), f32, {"impl": "kernel"}),
    (Case("none", None, True, "tied"), f32, {"impl": "torch", "chunk_rows": 64}),
    (Case("vanilla", None, True, "strided"), f64, {"impl": "torch"}),
]
LAYOUTS = [
    (2, "uneven"),
    (2, "padded"),
    (2, "padded to ranks without a column"),
    (3, "equal"),
    (3, "uneven"),
    (3, "padded"),
    (3, "a rank without a column"),
]


@pytest.mark.parametrize("world_size,layout", LAYOUTS)
def test_shards_have_the_loss_and_gradient_of_the_whole(world_size, layout):
    variants = [(case, dtype, layout, options) for case, dtype, options in VARIANTS]
    by_rank = run_ranks(_vocabulary_parallel, world_size, variants)
    for i, (case, dtype, _, options) in enumerate(variants):
        expected = fused(problem(case, dtype), impl=options["impl"])
        ranks = [made[i] for made in by_rank]
        try:
            assert_shards_are_the_whole(ranks, layout, expected, TOLERANCES[dtype])
        except AssertionError as error:
            pytest.fail(f"{world_size} ranks, {variants[i]}: {error}")


def test_shards_with_cross_entropy_alone():
    options = {"l1_loss_alpha": 0.0, "impl": "kernel"}
    variants = [(Case(), f32, "padded", options)]
    by_rank = run_ranks(_without_confidence, 2, variants)
    made = problem()
    del made.leaves["confidence"]
    assert_shards_are_the_whole(by_rank, "padded", fused(made, **options), TOLERANCES[f32])


def _without_confidence(rank: int, world_size: int, variants: list) -> dict:
    ((case, dtype, layout, options),) = variants
    shard = shards(layout, world_size)[rank]
    made = cut(problem(case, dtype), shard)
    del made.leaves["confidence"]
    return step(made, tp_group=dist.group.WORLD, chunk_rows=6, **shard.arguments, **options)


def _grid(rank: int, world_size: int, split: tuple) -> dict:
    """Two shards of the vocabulary by two shares of the batch."""
    shards_of_batch = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    shares_of_vocabulary = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    shard = shards("padded", 2)[rank % 2]
    made = cut(share(joined(Case(), split), anchors_of(split, rank // 2)), shard)
    return step(
        made,
        process_group=shares_of_vocabulary[rank % 2],
        tp_group=shards_of_batch[rank // 2],
        chunk_rows=6,
        **shard.arguments,
    )


def test_both_kinds_of_parallelism_at_once():
    split = (1, 4)
    expected = fused(joined(Case(), split))
    by_rank = run_ranks(_grid, 4, split)
    for pair in (by_rank[:2], by_rank[2:]):
        assert torch.equal(pair[0]["loss"], pair[1]["loss"])
    assert_close((by_rank[0]["loss"] + by_rank[2]["loss"]) / 2, expected.loss, 1e-6, "loss")
    columns = [shard.stop - shard.start for shard in shards("padded", 2)]
    for name, value in expected.gradients.items():
        parts = [made["gradients"][name] for made in by_rank]
        if name in ROWS:
            actual = torch.cat([parts[0], parts[2]], dim=1) / 2
        elif name in HEADS:
            shares = [parts[i] + parts[i + 2] for i in (0, 1)]
            actual = torch.cat([part[:n] for part, n in zip(shares, columns)]) / 2
        else:
            actual = (parts[0] + parts[2]) / 2
        assert_close(actual, value, TOLERANCES[f32], f"gradient of {name}")


# --- Collectives ---------------------------------------------------------------------------------


def _counted(rank: int, world_size: int) -> dict[str, list[str]]:
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    shard = shards("padded", world_size)[rank]
    made = cut(problem(), shard)
    counts = {"chunks of 4": -(-int(made.constants["eval_mask"].sum()) // 4)}

    def counted(name: str, **options: Any) -> Tensor:
        with CollectiveCounter() as counter:
            loss = compute_dspark_linear_loss(
                outputs=linear_output(made), **{**SETTINGS, "chunk_rows": 4, **options}
            )
        assert counter.sent == len(counter.events), (name, counter.events, counter.sent)
        counts[name] = counter.events
        return loss

    sharded = dict(tp_group=dist.group.WORLD, **shard.arguments)
    loss = counted("step", **sharded)
    with CollectiveCounter() as counter:
        loss.backward()
    counts["backward"] = counter.events
    counted("one chunk", **sharded, chunk_rows=None)
    with torch.no_grad():
        counted("evaluation", **sharded)
    made = share(problem(), slice(None))
    counted("data parallel")
    counted("a group of one", process_group=alone)
    counted("given denominators", denominators=torch.tensor(9.0))
    del made.leaves["confidence"]
    counted("cross-entropy alone, data parallel", l1_loss_alpha=0.0)
    made = cut(made, shard)
    counted("cross-entropy alone", **sharded, l1_loss_alpha=0.0)
    return counts


def test_two_collectives_a_chunk_and_one_for_the_gradient_of_hidden_states():
    for rank, counts in enumerate(run_ranks(_counted, 2)):
        chunks = counts.pop("chunks of 4")
        assert chunks > 2, "several chunks, or the count says little"
        gathers = {name: sum("gather" in e for e in events) for name, events in counts.items()}
        reduces = {name: events.count("all_reduce") for name, events in counts.items()}
        for name, gather, reduce in (
            ("step", 2 * chunks, 1),
            ("backward", 0, 0),
            ("one chunk", 2, 1),
            ("evaluation", 2 * chunks, 0),
            ("cross-entropy alone", chunks, 1),
            # Over the batch, the denominator alone, whatever the number of chunks.
            ("data parallel", 0, 1),
            ("cross-entropy alone, data parallel", 0, 1),
            ("a group of one", 0, 0),
            ("given denominators", 0, 0),
        ):
            found = (gathers[name], reduces[name])
            assert found == (gather, reduce), (rank, name, chunks, counts[name])
            assert len(counts[name]) == gather + reduce, (rank, name, counts[name])


# --- DTensor and FSDP2 ---------------------------------------------------------------------------


def _dtensors(rank: int, world_size: int, variants: list) -> list[dict]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard as Placement
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))

    def sharded(tensor: Tensor) -> Tensor:
        return distribute_tensor(tensor.detach(), mesh, [Placement(0)])

    results = []
    for case, keywords in variants:
        made = problem(case).fresh()
        for name in HEADS:
            if name in made.leaves:
                trained = made.leaves[name].requires_grad
                made.leaves[name] = sharded(made.leaves[name]).requires_grad_(trained)
        for name in ("target_weight", "target_bias"):
            if name in made.constants:
                made.constants[name] = sharded(made.constants[name])
        result = step(made, tp_group=mesh.get_group(), chunk_rows=6, **keywords)
        for name in HEADS:
            gradient = result["gradients"].get(name)
            if gradient is not None:
                assert tuple(gradient.placements) == (Placement(0),), (name, gradient.placements)
                result["gradients"][name] = gradient.full_tensor()
        results.append(result)
    return results


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_dtensor_heads_get_dtensor_gradients(bias, world_size):
    # 33 columns: equal shards on three ranks, 17 and 16 on two.
    variants = [
        (Case("vanilla", 4.0, bias, "own with bias" if bias else "own"), {}),
        (Case("none", None, bias, "tied", False), {"impl": "torch"}),
    ]
    by_rank = run_ranks(_dtensors, world_size, variants)
    for i, (case, options) in enumerate(variants):
        expected = fused(problem(case), **options)
        for rank, made in enumerate(result[i] for result in by_rank):
            assert torch.equal(made["loss"], by_rank[0][i]["loss"])
            assert_close(made["loss"], expected.loss, 1e-6, f"loss of {case} on rank {rank}")
            for name, value in expected.gradients.items():
                what = f"gradient of {name} of {case} on rank {rank}"
                assert_close(made["gradients"][name], value, 1e-6, what)


def _refusals(rank: int, world_size: int) -> dict[str, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor import Shard as Placement

    mesh = init_device_mesh("cpu", (world_size,))
    groups = [dist.new_group([r]) for r in range(world_size)]
    made = problem(Case("vanilla", None, False, "own"))
    weight = made.leaves["weight"]
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    fully_shard(head, mesh=mesh)
    by_rows = distribute_tensor(weight, mesh, [Placement(0)])
    by_width = distribute_tensor(weight, mesh, [Placement(1)])
    whole = distribute_tensor(weight, mesh, [Replicate()])
    whole_group = {"tp_group": mesh.get_group()}
    attempts = {
        "FSDP2": (dict(lm_head_weight=head.weight), {}),
        "DTensor without a group": (dict(lm_head_weight=by_rows), {}),
        "sharded by width": (dict(lm_head_weight=by_width), whole_group),
        "replicated": (dict(lm_head_weight=whole), whole_group),
        "teacher's": (dict(target_lm_head_weight=_like(made, by_rows)), {}),
        "another group": (
            dict(lm_head_weight=by_rows),
            {"tp_group": groups[rank], "process_group": mesh.get_group()},
        ),
        "no data-parallel group": ({}, {"tp_group": groups[rank]}),
        "hidden states": (
            dict(draft_hidden=distribute_tensor(made.leaves["hidden"], mesh, [Replicate()])),
            {},
        ),
    }
    answers = {}
    for name, (changes, options) in attempts.items():
        try:
            compute_dspark_linear_loss(
                outputs=linear_output(made, **changes), **SETTINGS, **options
            )
            answers[name] = "nothing"
        except Exception as error:
            answers[name] = f"{type(error).__name__}: {error}"
    return answers


def _like(made: Problem, weight: Any) -> Any:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(made.constants["target_weight"], weight.device_mesh, weight.placements)


def test_a_weight_that_is_not_a_shard_of_the_vocabulary_is_refused_with_what_to_do():
    unshard = ("TypeError: ", "DTensor", "unshard()", "full_tensor()", "tp_group", "Shard(0)")
    expected = {
        "FSDP2": ("lm_head_weight", *unshard),
        "DTensor without a group": ("lm_head_weight", *unshard),
        "sharded by width": ("lm_head_weight", *unshard),
        "replicated": ("lm_head_weight", *unshard),
        "teacher's": ("target_lm_head_weight", *unshard),
        "another group": ("TypeError: ", "lm_head_weight", "[0, 1]", "tp_group"),
        "no data-parallel group": ("ValueError: ", "process_group", "tp_group"),
        "hidden states": ("TypeError: ", "draft_hidden", "to_local()"),
    }
    for rank, answers in enumerate(run_ranks(_refusals, 2)):
        for name, parts in expected.items():
            for part in parts:
                assert part in answers[name], f"{name} on rank {rank}: {answers[name]}"


class Drafter(nn.Module):
    """A body and a head of its own, with the loss taken inside ``forward``."""

    def __init__(self, whole: Problem) -> None:
        super().__init__()
        columns, width = whole.leaves["weight"].shape
        torch.manual_seed(0)
        self.body = nn.Linear(width, width)
        self.head = nn.Linear(width, columns)
        with torch.no_grad():
            self.head.weight.copy_(whole.leaves["weight"])

    def forward(self, made: Problem) -> Tensor:
        leaves = {
            **made.leaves,
            "hidden": torch.tanh(self.body(made.leaves["hidden"])),
            "weight": self.head.weight,
            "bias": self.head.bias,
        }
        outputs = linear_output(Problem(made.case, leaves, made.constants))
        return compute_dspark_linear_loss(outputs=outputs, chunk_rows=7, **SETTINGS)


FSDP_SPLIT = (1, 5)
FSDP_CASE = Case("none", None, True, "own with bias")


def _fsdp(rank: int, world_size: int, how: str) -> dict[str, Tensor]:
    """Gradients of a drafter whose loss runs with whole heads, however they became whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    whole = joined(FSDP_CASE, FSDP_SPLIT)
    model = Drafter(whole)
    if world_size > 1:
        mesh = init_device_mesh("cpu", (world_size,))
        fully_shard(model.body, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if how == "unshard":
            model.unshard()
            assert not hasattr(model.head.weight, "placements")
        whole = share(whole, anchors_of(FSDP_SPLIT, rank))
    loss = model(whole)
    loss.backward()
    values = {n: p.grad for n, p in model.named_parameters()}
    values = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in values.items()}
    return {"loss": loss.detach(), **values}


@pytest.mark.parametrize("how", ["forward", "unshard"])
def test_inside_the_forward_of_an_fsdp2_module_its_heads_are_whole(how):
    expected = _fsdp(0, 1, how)
    ranks = run_ranks(_fsdp, 2, how)
    loss = sum(made["loss"] for made in ranks) / 2
    assert_close(loss, expected["loss"], 1e-6, "loss")
    for name, value in expected.items():
        if name != "loss":
            for rank, made in enumerate(ranks):
                assert_close(made[name], value, 1e-6, f"gradient of {name} on rank {rank}")


def _frozen_head(rank: int, world_size: int) -> list[dict]:
    """Steps with a frozen head that FSDP2 sharded, unsharded in the two ways."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    results = []
    for how in ("unshard", "full_tensor"):
        made = share(joined(CASES["frozen heads"], (1, 3)), anchors_of((1, 3), rank))
        columns, width = made.leaves["weight"].shape
        head = nn.Linear(width, columns, bias=False).requires_grad_(False)
        with torch.no_grad():
            head.weight.copy_(made.leaves["weight"])
        fully_shard(head, mesh=init_device_mesh("cpu", (world_size,)))
        if how == "unshard":
            head.unshard()
            made.leaves["weight"] = head.weight
        else:
            made.leaves["weight"] = head.weight.full_tensor()
        results.append(step(made))
    return results


def test_a_frozen_head_that_was_unsharded_gives_the_gradient_of_the_joined_batch():
    expected = fused(joined(CASES["frozen heads"], (1, 3)))
    by_rank = run_ranks(_frozen_head, 2)
    for i in range(2):
        ranks = [made[i] for made in by_rank]
        assert_ranks_are_the_joined_batch(ranks, (1, 3), expected, TOLERANCES[f32])
