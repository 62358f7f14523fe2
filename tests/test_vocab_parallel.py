"""Logits whose vocabulary is split over ranks, each a process: the unsharded results.

Expected values come from one process on the whole vocabulary. A ``Shard`` is what one rank holds
of it.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from typing import Any, Callable, NamedTuple

import pytest
import torch
import torch.distributed as dist
from conftest import relative_error
from inputs import OBJECTIVE, generator, labelled_rows, normal
from process_groups import CollectiveCounter, group_of_one, run_outcomes, run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dspark_ext import (
    DSparkForwardOutput,
    ce_and_l1,
    compute_dspark_loss,
    l1_distance,
    token_log_prob,
)

TOLERANCE = 1e-6
IMPLS = ("kernel", "torch")
A, K = 4, 4
NAN = float("nan")


class Shard(NamedTuple):
    """Columns [start, stop) of the vocabulary, and how many columns of padding follow them."""

    start: int
    stop: int
    padding: int = 0


def shards(layout: str, world_size: int, V: int) -> list[Shard]:
    if layout == "padded":
        # As frameworks do: one width for all, a multiple of the ranks, the last columns unused.
        width = -(-V // world_size) + 1
    elif layout == "dtensor":
        width = -(-V // world_size)
    else:
        # One column, then nearly none, then the rest in pieces of different sizes.
        cuts = [0, 1, *(1 + (V - 1) * i * i // (world_size - 1) ** 2 for i in range(1, world_size))]
        return [Shard(start, stop) for start, stop in zip(cuts, cuts[1:])]
    bounds = [min(rank * width, V) for rank in range(world_size + 1)]
    return [
        Shard(start, stop, width - (stop - start) if layout == "padded" else 0)
        for start, stop in zip(bounds, bounds[1:])
    ]


@dataclasses.dataclass
class Rows:
    """``[1, A, K, V]`` logits with their labels, a mask, and upstream gradients."""

    draft: Tensor
    target: Tensor
    ids: Tensor
    active: Tensor
    confidence: Tensor
    upstream: tuple[Tensor, Tensor]


def rows(V: int, dtype: torch.dtype = torch.float32) -> Rows:
    """Every regime of logits; labels in every shard, at its first and its last columns; leading
    stretches of -inf in either; a tie; an ignored label; an inactive row that is nonsense."""
    count = A * K
    regimes = labelled_rows(0, V, dtype)
    draft, target = normal(1, count, V).to(dtype), normal(2, count, V).to(dtype)
    ids = torch.randint(V, (count,), generator=generator(3))
    ids[:7] = torch.tensor([0, V // 4, V // 3, V // 2, 2 * V // 3, 3 * V // 4, V - 1])
    draft[:6], target[:6], ids[8:14] = regimes.draft, regimes.target, regimes.ids
    draft[8:14], target[8:14] = regimes.draft, regimes.target
    draft[6, : V // 2], target[7, : V // 2] = -torch.inf, -torch.inf
    draft[7, :-1], ids[7] = -torch.inf, V - 1
    target[13] = draft[13]
    ids[14] = -100
    active = torch.ones(count, dtype=torch.bool)
    active[15], ids[15], draft[15], target[15] = False, 2**40, NAN, NAN
    return Rows(
        draft.view(1, A, K, V),
        target.view(1, A, K, V),
        ids.view(1, A, K),
        active.view(1, A, K),
        normal(4, 1, A, K).to(torch.float64 if dtype == torch.float64 else torch.float32),
        (normal(5, 1, A, K).to(dtype).float(), normal(6, 1, A, K).to(dtype).float()),
    )


def results(whole: Rows, share: Callable[[Tensor], Tensor], **keywords: Any) -> dict[str, Tensor]:
    """What the four functions give for the logits that ``share`` takes from the whole ones."""
    found: dict[str, Tensor] = {}

    def leaf() -> Tensor:
        return share(whole.draft).detach().requires_grad_()

    target, active = share(whole.target), whole.active
    draft = leaf()
    found["ce"], found["l1"] = ce_and_l1(draft, target, whole.ids, active=active, **keywords)
    torch.autograd.backward([found["ce"], found["l1"]], list(whole.upstream))
    found["gradient of ce and l1"] = draft.grad

    draft = leaf()
    found["l1 alone"] = l1_distance(draft, target, active=active, **keywords)
    found["l1 alone"].backward(whole.upstream[0])
    found["gradient of l1 alone"] = draft.grad

    draft = leaf()
    found["log_prob"] = token_log_prob(draft, whole.ids, active=active, **keywords)
    found["log_prob"].backward(whole.upstream[1])
    found["gradient of log_prob"] = draft.grad

    draft, confidence = leaf(), whole.confidence.clone().requires_grad_()
    keep = torch.ones(1, A, dtype=torch.bool)
    made = DSparkForwardOutput(draft, whole.ids, active, keep, confidence, target)
    found["loss"], terms = compute_dspark_loss(
        outputs=made, return_terms=True, **OBJECTIVE, **keywords
    )
    found["loss"].backward()
    found["gradient of loss"] = draft.grad
    found["confidence"] = confidence.grad
    found.update(terms)
    return {name: value.detach() for name, value in found.items()}


@functools.cache
def unsharded(V: int, impl: str = "auto", dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return results(rows(V, dtype), lambda logits: logits, impl=impl)


def take(shard: Shard, logits: Tensor) -> Tensor:
    """A rank's columns, a view of the whole, or with NaN behind them where it is padded."""
    part = logits[..., shard.start : shard.stop]
    if not shard.padding:
        return part
    return torch.cat([part, part.new_full((*part.shape[:-1], shard.padding), NAN)], dim=-1)


def _results(
    rank: int, world_size: int, V: int, layouts: list[str], dtype: torch.dtype
) -> dict[tuple[str, str], dict[str, Tensor]]:
    whole, group, found = rows(V, dtype), dist.group.WORLD, {}
    for layout in layouts:
        shard = shards(layout, world_size, V)[rank]
        for impl in IMPLS:
            if layout == "dtensor":
                found[layout, impl] = _dtensor_results(whole, world_size, impl)
                continue
            keywords: dict[str, Any] = {"vocab_size": V} if layout == "padded" else {}
            if layout == "uneven":
                keywords = {"vocab_start": shard.start}
            share = functools.partial(take, shard)
            found[layout, impl] = results(whole, share, impl=impl, tp_group=group, **keywords)
    return found


def _dtensor_results(whole: Rows, world_size: int, impl: str) -> dict[str, Tensor]:
    from torch.distributed.tensor import DTensor, distribute_tensor
    from torch.distributed.tensor import Shard as Sharded

    mesh = init_device_mesh("cpu", (world_size,))

    def distribute(logits: Tensor) -> Tensor:
        return distribute_tensor(logits, mesh, [Sharded(logits.dim() - 1)])

    found = results(whole, distribute, impl=impl)
    for name, value in found.items():
        assert isinstance(value, DTensor) == name.startswith("gradient"), name
        if isinstance(value, DTensor):
            assert value.placements == (Sharded(3),), (name, value.placements)
            assert value.device_mesh == mesh, name
            assert value.shape == whole.draft.shape, name
            found[name] = value.to_local()
    return found


def assert_is_the_unsharded_result(
    by_rank: list[dict[str, Tensor]],
    expected: dict[str, Tensor],
    layout: list[Shard],
    case: str,
    gradient_tolerance: float = TOLERANCE,
    tolerance: float = TOLERANCE,
) -> None:
    for name, value in expected.items():
        what = f"{name}, {case}"
        assert value.isfinite().all(), f"nothing to compare with: {what}"
        if name.startswith("gradient"):
            parts = [made[name] for made in by_rank]
            for part, shard in zip(parts, layout):
                columns = shard.stop - shard.start
                assert part.shape[-1] == columns + shard.padding, what
                assert not part[..., columns:].any(), f"padding has a gradient: {what}"
            joined = [part[..., : s.stop - s.start] for part, s in zip(parts, layout)]
            found = torch.cat(joined, dim=-1)
            for i, (mine, theirs) in enumerate(zip(found.view(A * K, -1), value.view(A * K, -1))):
                error = relative_error(mine, theirs)
                assert error <= gradient_tolerance, f"row {i}: {error:.3g}, {what}"
        else:
            first = by_rank[0][name]
            assert all(torch.equal(first, made[name]) for made in by_rank), f"ranks differ: {what}"
            torch.testing.assert_close(
                first,
                value,
                rtol=tolerance,
                atol=tolerance,
                msg=lambda m, what=what: f"{what}\n{m}",
            )


@pytest.mark.parametrize("V", [10, 32003, 151936])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_shards_give_the_unsharded_result_and_every_rank_the_same_bits(world_size, V):
    # A DTensor is the same code at every size.
    layouts = ["uneven", "padded", "dtensor"][: 3 if V < 100_000 else 2]
    by_rank = run_ranks(_results, world_size, V, layouts, torch.float32)
    for impl in IMPLS:
        expected = unsharded(V, impl)
        for layout in layouts:
            found = [made[layout, impl] for made in by_rank]
            split = shards(layout, world_size, V)
            case = f"V={V}, {layout} {split}, impl={impl}"
            assert_is_the_unsharded_result(found, expected, split, case)


# With 9 columns over 4 ranks DTensor leaves the last without any; with 2 so does every layout.
@pytest.mark.parametrize("V", [9, 2])
def test_a_shard_may_have_no_column(V):
    layouts = ["padded", "dtensor", "uneven"] if V == 2 else ["padded", "dtensor"]
    assert any(s.start == s.stop for layout in layouts for s in shards(layout, 4, V))
    by_rank = run_ranks(_results, 4, V, layouts, torch.float32)
    for impl in IMPLS:
        expected = unsharded(V, impl)
        for layout in layouts:
            found = [made[layout, impl] for made in by_rank]
            split = shards(layout, 4, V)
            case = f"V={V}, {layout} {split}, impl={impl}"
            assert_is_the_unsharded_result(found, expected, split, case)


def _every_dtype(rank: int, world_size: int, V: int, dtypes: list[torch.dtype]) -> list[dict]:
    return [_results(rank, world_size, V, ["uneven", "padded"], dtype) for dtype in dtypes]


def test_every_dtype_gives_the_unsharded_result():
    # Both sides round the gradient once, and a few roundings fall differently.
    tolerances = {torch.bfloat16: 2e-3, torch.float16: 3e-4, torch.float64: 1e-12}
    by_rank = run_ranks(_every_dtype, 2, 257, list(tolerances))
    for i, (dtype, tolerance) in enumerate(tolerances.items()):
        for (layout, impl), _ in by_rank[0][i].items():
            found = [made[i][layout, impl] for made in by_rank]
            split = shards(layout, 2, 257)
            assert_is_the_unsharded_result(
                found,
                unsharded(257, impl, dtype),
                split,
                f"{dtype}, {layout} {split}, impl={impl}",
                tolerance,
                min(tolerance, TOLERANCE),
            )


def _equal_shards(rank: int, world_size: int, V: int) -> dict[str, Tensor]:
    width = V // world_size
    shard = Shard(rank * width, (rank + 1) * width)
    return results(rows(V), functools.partial(take, shard), tp_group=dist.group.WORLD)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equal_shards_need_nothing_but_the_group(world_size):
    V = 64
    by_rank = run_ranks(_equal_shards, world_size, V)
    expected = unsharded(V)
    width = V // world_size
    split = [Shard(start, start + width) for start in range(0, V, width)]
    assert_is_the_unsharded_result(by_rank, expected, split, f"{split}")


# --- Ids that are no column ---------------------------------------------------------------------


def _bad_ids(rank: int, world_size: int, V: int) -> list[tuple[str, str]]:
    """What each of some bad ids raises, and whether the group still works afterwards."""
    whole, group = rows(V), dist.group.WORLD
    shard = shards("padded", world_size, V)[rank]
    draft, target = take(shard, whole.draft), take(shard, whole.target)
    keep = torch.ones(1, A, dtype=torch.bool)
    made = DSparkForwardOutput(draft, whole.ids, whole.active, keep, None, target)
    answers = []
    for impl in IMPLS:
        # The first column of padding, which some rank holds; one that none holds; negative ones.
        for bad in (V, 10 * V, -1, -99):
            ids = whole.ids.clone()
            ids[0, 1, 2] = bad
            shared = {"tp_group": group, "vocab_size": V, "impl": impl}
            calls = {
                "ce_and_l1": functools.partial(
                    ce_and_l1, draft, target, ids, active=whole.active, **shared
                ),
                "token_log_prob": functools.partial(
                    token_log_prob, draft, ids, active=whole.active, **shared
                ),
                "compute_dspark_loss": functools.partial(
                    compute_dspark_loss,
                    outputs=dataclasses.replace(made, target_ids=ids),
                    **OBJECTIVE,
                    **shared,
                ),
            }
            for name, call in calls.items():
                try:
                    call()
                    answer = "no error"
                except IndexError as error:
                    answer = str(error)
                answers.append((f"{name}, id {bad}, impl={impl}", answer))
    total = torch.ones(())
    dist.all_reduce(total)
    assert total == world_size, "the group's collectives are out of step"
    return answers


def test_an_id_that_is_no_column_raises_on_every_rank_and_leaves_the_group_in_step():
    by_rank = run_ranks(_bad_ids, 3, 10, timeout=30)
    for rank, answers in enumerate(by_rank):
        for case, answer in answers:
            bad = case.split("id ")[1].split(",")[0]
            assert f"[0, 1, 2] is {bad}" in answer, f"rank {rank}, {case}: {answer}"


# --- Data parallel and vocabulary parallel ------------------------------------------------------

SUPERVISED = (1, 11)  # rows of the two data-parallel ranks


def two_by_two(data_rank: int, V: int, anchors: int = A) -> DSparkForwardOutput:
    """A data-parallel rank's batch, ``[1, anchors, K, V]``."""
    whole = rows(V)
    mask = torch.zeros(A * K, dtype=torch.bool)
    mask[torch.arange(SUPERVISED[data_rank]) + data_rank] = True
    made = DSparkForwardOutput(
        (whole.draft / (1 + data_rank)).nan_to_num(0.0, neginf=-torch.inf),
        whole.ids.clamp(-100, V - 1),
        mask.view(1, A, K),
        torch.ones(1, A, dtype=torch.bool),
        whole.confidence + data_rank,
        whole.target.nan_to_num(0.0, neginf=-torch.inf),
    )
    return DSparkForwardOutput(**{n: value[:, :anchors] for n, value in vars(made).items()})


def gradients_of(made: DSparkForwardOutput, **keywords: Any) -> dict[str, Any]:
    draft = made.draft_logits.detach().requires_grad_()
    confidence = made.confidence_pred.detach().clone().requires_grad_()
    made = dataclasses.replace(made, draft_logits=draft, confidence_pred=confidence)
    loss = compute_dspark_loss(outputs=made, **{**OBJECTIVE, **keywords})
    loss.backward()
    return {"loss": loss.detach(), "draft": draft.grad, "confidence": confidence.grad}


def _two_by_two(rank: int, world_size: int, V: int, anchors: tuple[int, int]) -> dict[str, Any]:
    from torch.distributed.tensor import Shard as Sharded
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data_rank, tp_rank = rank // 2, rank % 2
    made = two_by_two(data_rank, V, anchors[data_rank])
    cut = V // 3
    shard = (Shard(0, cut), Shard(cut, V))[tp_rank]
    local = dataclasses.replace(
        made,
        draft_logits=take(shard, made.draft_logits),
        aligned_target_logits=take(shard, made.aligned_target_logits),
    )
    dp, tp = mesh["dp"].get_group(), mesh["tp"].get_group()
    shared: dict[str, Any] = {"tp_group": tp, "vocab_start": shard.start}
    refusals = []
    for keywords in (shared, {"tp_group": tp}):
        try:
            gradients_of(local, **keywords)
        except ValueError as error:
            refusals.append(str(error))
    distributed = dataclasses.replace(
        made,
        draft_logits=distribute_tensor(made.draft_logits, mesh["tp"], [Sharded(3)]),
        aligned_target_logits=distribute_tensor(
            made.aligned_target_logits, mesh["tp"], [Sharded(3)]
        ),
    )
    try:
        gradients_of(distributed)
    except ValueError as error:
        refusals.append(str(error))
    dtensor = gradients_of(distributed, process_group=dp)
    dtensor["draft"] = dtensor["draft"].full_tensor()
    plain = gradients_of(local, process_group=dp, **shared)
    return {"plain": plain, "dtensor": dtensor, "refusals": refusals, "shard": shard}


@pytest.mark.parametrize("anchors", [(A, A), (A, 0)], ids=["both", "one without anchors"])
def test_data_times_vocabulary_parallel_has_the_gradient_of_the_joined_batch(anchors):
    V = 33
    by_rank = run_ranks(_two_by_two, 4, V, anchors)
    parts = [two_by_two(data_rank, V, anchors[data_rank]) for data_rank in range(2)]
    joined = {name: torch.cat([getattr(p, name) for p in parts], 1) for name in vars(parts[0])}
    expected = gradients_of(DSparkForwardOutput(**joined))
    for rank, made in enumerate(by_rank):
        assert len(made["refusals"]) == 3, made["refusals"]
        assert all("process_group" in refusal for refusal in made["refusals"]), made["refusals"]
        mine = slice(A * (rank // 2), A * (rank // 2 + 1))
        plain, dtensor, shard = made["plain"], made["dtensor"], made["shard"]
        for what, found, columns in (
            ("plain", plain, slice(shard.start, shard.stop)),
            ("dtensor", dtensor, slice(0, V)),
        ):
            error = relative_error(found["draft"] / 2, expected["draft"][:, mine, :, columns])
            assert error <= TOLERANCE, f"gradient of the draft, {what}, rank {rank}: {error:.3g}"
            error = relative_error(found["confidence"] / 2, expected["confidence"][:, mine])
            assert error <= TOLERANCE, f"gradient of confidence, {what}, rank {rank}: {error:.3g}"
    for what in ("plain", "dtensor"):
        losses = [made[what]["loss"] for made in by_rank]
        assert losses[0] == losses[1] and losses[2] == losses[3], losses
        assert relative_error((losses[0] + losses[2]) / 2, expected["loss"]) <= TOLERANCE


def test_a_shard_without_its_group_is_refused():
    made = two_by_two(0, 33)
    for keywords in ({"vocab_start": 3}, {"vocab_size": 30}):
        with pytest.raises(ValueError, match="tp_group"):
            compute_dspark_loss(outputs=made, **OBJECTIVE, **keywords)
        with pytest.raises(ValueError, match="tp_group"):
            l1_distance(made.draft_logits, made.aligned_target_logits, **keywords)


def test_a_shard_of_less_than_nothing_is_refused():
    made = two_by_two(0, 33)
    with group_of_one() as group:
        for name in ("vocab_start", "vocab_size"):
            keywords = {"tp_group": group, name: -1}
            with pytest.raises(ValueError, match=f"{name} is -1; expected at least 0"):
                l1_distance(made.draft_logits, made.aligned_target_logits, **keywords)


# --- DTensors -----------------------------------------------------------------------------------


def _refused_dtensors(rank: int, world_size: int, V: int) -> dict[str, str]:
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor import Shard as Sharded

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = rows(V)

    def distribute(logits: Tensor, sub_mesh: Any, *placements: Any) -> Tensor:
        return distribute_tensor(logits, sub_mesh, list(placements))

    tp, dp = mesh["tp"], mesh["dp"]
    by_vocabulary = distribute(whole.draft, tp, Sharded(3))
    cases: dict[str, tuple[Tensor, Tensor, dict[str, Any]]] = {
        name: (
            distribute(whole.draft, sub_mesh, *placements),
            distribute(whole.target, sub_mesh, *placements),
            {},
        )
        for name, sub_mesh, placements in (
            ("replicated", tp, (Replicate(),)),
            ("by anchors", tp, (Sharded(1),)),
            ("two dimensions", mesh, (Sharded(1), Sharded(3))),
            ("two dimensions, one replicated", mesh, (Replicate(), Sharded(3))),
            ("vocabulary over both", mesh, (Sharded(3), Sharded(3))),
        )
    }
    cases["target is plain"] = (by_vocabulary, whole.target, {})
    cases["draft is plain"] = (whole.draft, by_vocabulary, {})
    cases["other mesh"] = (by_vocabulary, distribute(whole.target, dp, Sharded(3)), {})
    cases["target replicated"] = (by_vocabulary, distribute(whole.target, tp, Replicate()), {})
    for name, value in (("tp_group", tp.get_group()), ("vocab_start", 0), ("vocab_size", V)):
        cases[name] = (by_vocabulary, by_vocabulary, {name: value})
    answers = {}
    keep = torch.ones(1, A, dtype=torch.bool)
    for name, (draft, target, keywords) in cases.items():
        calls = (
            functools.partial(ce_and_l1, draft, target, whole.ids, **keywords),
            functools.partial(
                compute_dspark_loss,
                outputs=DSparkForwardOutput(draft, whole.ids, whole.active, keep, None, target),
                process_group=dp.get_group(),
                **OBJECTIVE,
                **keywords,
            ),
        )
        for call in calls:
            function = call.func.__name__
            try:
                call()
                answers[f"{name}: {function}"] = "no error"
            except Exception as error:
                answers[f"{name}: {function}"] = f"{type(error).__name__}: {error}"
    return answers


def test_other_dtensors_are_refused_with_what_to_do_instead():
    for rank, answers in enumerate(run_ranks(_refused_dtensors, 4, 12)):
        for case, answer in answers.items():
            name = case.split(":")[0]
            what = f"rank {rank}, {case}: {answer}"
            if name in ("tp_group", "vocab_start", "vocab_size"):
                assert answer.startswith("ValueError"), what
            elif "plain" in name or name == "other mesh":
                assert answer.startswith("TypeError"), what
            else:
                assert answer.startswith("TypeError"), what
                assert "to_local()" in answer and "redistribute(" in answer, what


# --- Collectives, time and memory ---------------------------------------------------------------


def _counted(
    rank: int, world_size: int, V: int, impl: str
) -> dict[str, tuple[list[str], list[int], int]]:
    whole, group = rows(V), dist.group.WORLD
    shard = shards("padded", world_size, V)[rank]
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("dp", "tp"))
    shared: dict[str, Any] = {"tp_group": group, "vocab_size": V, "impl": impl}
    counted: dict[str, tuple[list[str], list[int], int]] = {}

    def count(name: str, call: Callable[[], Tensor]) -> None:
        logits = (draft, target)
        with CollectiveCounter(logits) as forward:
            value = call()
        with CollectiveCounter(logits) as backward:
            value.sum().backward()
        for what, counter in ((name, forward), (f"backward of {name}", backward)):
            counted[what] = (counter.events, counter.elements, counter.sent)

    draft, target = take(shard, whole.draft).requires_grad_(), take(shard, whole.target)
    made = DSparkForwardOutput(
        draft, whole.ids, whole.active, torch.ones(1, A, dtype=torch.bool), None, target
    )
    count(
        "ce_and_l1", lambda: sum(ce_and_l1(draft, target, whole.ids, active=whole.active, **shared))
    )
    count("l1_distance", lambda: l1_distance(draft, target, active=whole.active, **shared))
    count("token_log_prob", lambda: token_log_prob(draft, whole.ids, active=whole.active, **shared))
    count("loss", lambda: compute_dspark_loss(outputs=made, **OBJECTIVE, **shared))
    dp = mesh["dp"].get_group()
    count(
        "loss, one data-parallel rank",
        lambda: compute_dspark_loss(outputs=made, process_group=dp, **OBJECTIVE, **shared),
    )
    return counted


def _counted_two_by_two(rank: int, world_size: int, V: int) -> tuple[list[str], int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    made = two_by_two(rank // 2, V)
    half = V // 2
    shard = Shard(rank % 2 * half, (rank % 2 + 1) * half)
    made.draft_logits = take(shard, made.draft_logits).detach().requires_grad_()
    made.aligned_target_logits = take(shard, made.aligned_target_logits)
    with CollectiveCounter((made.draft_logits, made.aligned_target_logits)) as counter:
        compute_dspark_loss(
            outputs=made,
            process_group=mesh["dp"].get_group(),
            tp_group=mesh["tp"].get_group(),
            **OBJECTIVE,
        ).backward()
    return counter.events, counter.sent


GATHERS = ("all_gather_into_tensor", "all_gather_single")
# Numbers a row: both rows' statistics, the label's logit and whether it is here; l1 and its sides.
NUMBERS = {"token_log_prob": [5], "l1_distance": [6, 3]}


def test_two_collectives_in_forward_and_none_in_backward(impl):
    for rank, counted in enumerate(run_ranks(_counted, 2, 10, impl)):
        for name, (events, elements, sent) in counted.items():
            collectives = [event for event in events if event != "read"]
            numbers = [] if name.startswith("backward") else NUMBERS.get(name, [8, 3])
            what = f"rank {rank}, {name}: {events} of {elements} elements, {sent} sent"
            assert elements == [n * A * K for n in numbers], what
            assert len(collectives) == len(numbers) == sent, what
            assert all(collective in GATHERS for collective in collectives), what
            assert "read" in events, what


def test_two_by_two_has_one_more_collective_before_the_logits_are_read():
    for events, sent in run_ranks(_counted_two_by_two, 4, 34):
        collectives = [event for event in events if event != "read"]
        assert collectives[0] == events[0] == "all_reduce", events
        assert len(collectives) == sent == 3, (events, sent)
        assert all(collective in GATHERS for collective in collectives[1:]), events


def _step_of_a_share(
    rank: int, world_size: int, V: int, shares: list[int], impl: str
) -> dict[int, dict[str, float]]:
    """CPU seconds and allocated bytes of a step on 1/n of the columns, through the code of a
    shard: the group's other ranks are left out, as they do not change what this one computes."""
    N = {"kernel": 64, "torch": 24}[impl]
    found = {n: {"seconds": float("inf")} for n in shares}
    keywords: dict[str, Any] = {"tp_group": dist.group.WORLD, "impl": impl}

    def step(n: int) -> None:
        ids = torch.arange(N) % (V // n)
        ce, l1 = ce_and_l1(draft[n], target[n], ids, **keywords)
        torch.autograd.backward([ce, l1], [torch.ones(N), torch.ones(N)])
        draft[n].grad = None

    draft = {n: normal(n, N, V // n).float().requires_grad_() for n in shares}
    target = {n: normal(-n, N, V // n).float() for n in shares}
    for _ in range(4):
        for n in shares:
            begun = time.thread_time()
            step(n)
            found[n]["seconds"] = min(found[n]["seconds"], time.thread_time() - begun)
    for n in shares:
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            step(n)
        sizes = [event.self_cpu_memory_usage for event in profile.events()]
        found[n]["bytes"] = sum(size for size in sizes if size > 0)
    return found


@pytest.mark.parametrize("impl", IMPLS)
def test_time_and_memory_of_a_rank_fall_as_one_over_the_ranks(impl):
    (found,) = run_ranks(_step_of_a_share, 1, 151936, [1, 2, 4], impl)
    for n in (2, 4):
        bytes_left = found[n]["bytes"] / found[1]["bytes"]
        assert abs(bytes_left * n - 1) < 0.1, (n, bytes_left, found)
        # Loose: what is left in the caches by one step serves the next.
        seconds_left = found[n]["seconds"] / found[1]["seconds"]
        assert 0.3 < seconds_left * n < 1.5, (n, seconds_left, found)


# --- Compilation and failures -------------------------------------------------------------------


def _compiled(rank: int, world_size: int, V: int, backend: str) -> dict[str, Tensor]:
    group, width = dist.group.WORLD, V // world_size
    shard = Shard(rank * width, (rank + 1) * width)
    made = two_by_two(1, V)
    target = take(shard, made.aligned_target_logits)

    def step(logits: Tensor, confidence: Tensor) -> Tensor:
        local = dataclasses.replace(
            made,
            draft_logits=logits * 1,
            confidence_pred=confidence * 1,
            aligned_target_logits=target,
        )
        return compute_dspark_loss(outputs=local, tp_group=group, **OBJECTIVE)

    draft = take(shard, made.draft_logits).detach().clone().requires_grad_()
    confidence = made.confidence_pred.clone().requires_grad_()
    loss = torch.compile(step, fullgraph=True, backend=backend)(draft, confidence)
    loss.backward()
    return {"loss": loss.detach(), "gradient of loss": draft.grad, "confidence": confidence.grad}


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_sharded_step_compiles_into_one_graph(backend):
    V = 34
    by_rank = run_ranks(_compiled, 2, V, backend, timeout=300)
    made = gradients_of(two_by_two(1, V))
    expected = {
        "loss": made["loss"],
        "gradient of loss": made["draft"],
        "confidence": made["confidence"],
    }
    split = [Shard(0, V // 2), Shard(V // 2, V)]
    assert_is_the_unsharded_result(by_rank, expected, split, backend)


def _step_that_fails_on_rank_1(rank: int, world_size: int, how: str, timeout: float) -> Any:
    width = 5
    whole = rows(width * world_size)
    shard = Shard(rank * width, (rank + 1) * width)
    draft, target = take(shard, whole.draft), take(shard, whole.target)

    def step(ids: Tensor) -> None:
        ce_and_l1(draft, target, ids, active=whole.active, tp_group=dist.group.WORLD)

    step(whole.ids)
    dist.barrier()
    begun = time.monotonic()
    if rank == 1:
        if how == "dies":
            os._exit(9)
        if how == "raises":
            step(whole.ids[:, :1])
        if how == "hangs":
            time.sleep(timeout + 1)
            return None
    try:
        step(whole.ids)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    return "nothing", "", time.monotonic() - begun


@pytest.mark.parametrize(
    ("how", "kind"), [("dies", "died"), ("raises", "raised"), ("hangs", "returned")]
)
def test_the_other_ranks_end_with_an_error_when_one(how, kind):
    timeout = 3.0
    outcomes = run_outcomes(_step_that_fails_on_rank_1, 3, how, timeout, timeout=timeout)
    kinds = [outcome.kind for outcome in outcomes]
    assert kinds == ["returned", kind, "returned"], "\n".join(map(str, outcomes))
    for outcome in (outcomes[0], outcomes[2]):
        error, message, seconds = outcome.value
        assert error in ("RuntimeError", "DistBackendError", "DistNetworkError"), (error, message)
        assert "gloo" in message or "timed out" in message.lower(), message
        assert seconds <= timeout + 2, seconds
