"""Wrong arguments for every public function, called in a process that a crash may end.

``one_at_a_time(name)`` gives a function each of its arguments wrong in each way of ``WRONG``, all
others right; ``at_random(seed, count)`` mixes several. Both note every call in a file before they
make it, so that the last line of the file is what a crash died of.
"""

from __future__ import annotations

import random
import sys
import types
import warnings
from typing import Any, Callable

import numpy
import torch
from inputs import generator, outputs
from torch import Tensor

import dspark_ext
from dspark_ext import loss as reference_names

SHAPE = (2, 3, 4)
V, H, R = 33, 8, 2


def plain() -> dict[str, Any]:
    """Arguments of every function, by name, all of them right."""
    made = outputs(1, (*SHAPE, V))
    g = generator(2)
    return {
        **vars(made),
        "draft_hidden": torch.randn(*SHAPE, H, generator=g, requires_grad=True),
        "lm_head_weight": torch.randn(V, H, generator=g, requires_grad=True),
        "lm_head_bias": torch.randn(V, generator=g),
        "markov_features": torch.randn(*SHAPE, R, generator=g),
        "markov_weight": torch.randn(V, R, generator=g),
        "target_hidden": torch.randn(*SHAPE, H, generator=g),
        "target_lm_head_weight": torch.randn(V, H, generator=g),
        "target_lm_head_bias": torch.randn(V, generator=g),
        "final_logit_softcap": 5.0,
        "chunk_rows": 5,
        "loss_decay_gamma": 4.0,
        "ce_loss_alpha": 0.3,
        "l1_loss_alpha": 0.7,
        "confidence_head_alpha": 0.5,
        "process_group": None,
        "denominators": torch.tensor(9.0),
        "tp_group": None,
        "vocab_start": None,
        "vocab_size": None,
        "grad_reduction": "mean",
        "impl": "auto",
        "active": made.eval_mask,
        "eval_masks": [made.eval_mask, made.eval_mask],
        "block_size": 4,
    }


# --- Functions -----------------------------------------------------------------------------------

OUTPUTS = (
    "draft_logits",
    "target_ids",
    "eval_mask",
    "block_keep_mask",
    "confidence_pred",
    "aligned_target_logits",
)
LINEAR_OUTPUTS = (
    "draft_hidden",
    "lm_head_weight",
    "target_ids",
    "eval_mask",
    "block_keep_mask",
    "confidence_pred",
    "markov_features",
    "markov_weight",
    "target_hidden",
    "target_lm_head_weight",
    "lm_head_bias",
    "target_lm_head_bias",
    "final_logit_softcap",
)
ALPHAS = ("loss_decay_gamma", "ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha")
OPTIONS = ("process_group", "denominators", "tp_group", "vocab_start", "vocab_size")
OPTIONS += ("grad_reduction", "impl")
OF_ROWS = ("tp_group", "vocab_start", "vocab_size", "impl")


def _run(value: Any) -> None:
    """Through backward too, where there is one."""
    tensors = value if isinstance(value, tuple) else (value,)
    total = sum(t.sum() for t in tensors if isinstance(t, Tensor))
    if isinstance(total, Tensor) and total.requires_grad:
        total.backward()


def _taken(arguments: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: arguments[name] for name in names}


def loss(arguments: dict[str, Any], inplace: bool = False) -> None:
    made = types.SimpleNamespace(**_taken(arguments, OUTPUTS))
    if inplace and isinstance(made.draft_logits, Tensor) and made.draft_logits.requires_grad:
        made.draft_logits = made.draft_logits * 1
    options = _taken(arguments, ALPHAS + OPTIONS)
    value, terms = dspark_ext.compute_dspark_loss(
        outputs=made, return_terms=True, inplace_grad=inplace, **options
    )
    _run(value)


def module(arguments: dict[str, Any]) -> None:
    options = _taken(arguments, OPTIONS)
    fixed = {name: options.pop(name) for name in ("grad_reduction", "impl")}
    made = dspark_ext.DSparkForwardOutput(**_taken(arguments, OUTPUTS))
    _run(dspark_ext.DSparkLoss(**_taken(arguments, ALPHAS), **fixed)(made, **options))


def linear_loss(arguments: dict[str, Any]) -> None:
    made = types.SimpleNamespace(**_taken(arguments, LINEAR_OUTPUTS))
    options = _taken(arguments, (*ALPHAS, *OPTIONS, "chunk_rows"))
    _run(dspark_ext.compute_dspark_linear_loss(outputs=made, **options))


def rows(arguments: dict[str, Any]) -> None:
    tensors = _taken(arguments, ("draft_logits", "aligned_target_logits", "target_ids"))
    options = _taken(arguments, ("active", *OF_ROWS))
    _run(dspark_ext.ce_and_l1(*tensors.values(), **options))


def distance(arguments: dict[str, Any]) -> None:
    tensors = _taken(arguments, ("draft_logits", "aligned_target_logits"))
    options = _taken(arguments, ("active", *OF_ROWS))
    _run(dspark_ext.l1_distance(*tensors.values(), **options))


def log_prob(arguments: dict[str, Any]) -> None:
    tensors = _taken(arguments, ("draft_logits", "target_ids"))
    options = _taken(arguments, ("active", *OF_ROWS))
    _run(dspark_ext.token_log_prob(*tensors.values(), **options))


def denominators(arguments: dict[str, Any]) -> None:
    masks, gamma = arguments["eval_masks"], arguments["loss_decay_gamma"]
    _run(dspark_ext.loss_denominators(masks, gamma, arguments["process_group"]))


def meter(arguments: dict[str, Any]) -> None:
    window = dspark_ext.AcceptanceMeter(arguments["block_size"])
    window.update(arguments["terms"])
    window.all_reduce(arguments["process_group"])
    window.compute()
    window.load_state_dict(arguments["state"])
    window.update(arguments["terms"])


# Every function with the arguments it takes.
FUNCTIONS: dict[str, tuple[Callable[..., None], tuple[str, ...]]] = {
    "compute_dspark_loss": (loss, (*OUTPUTS, *ALPHAS, *OPTIONS)),
    "inplace_grad": (lambda arguments: loss(arguments, True), (*OUTPUTS, *ALPHAS, *OPTIONS)),
    "DSparkLoss": (module, (*OUTPUTS, *ALPHAS, *OPTIONS)),
    "compute_dspark_linear_loss": (
        linear_loss,
        (*LINEAR_OUTPUTS, *ALPHAS, *OPTIONS, "chunk_rows"),
    ),
    "ce_and_l1": (
        rows,
        ("draft_logits", "aligned_target_logits", "target_ids", "active", *OF_ROWS),
    ),
    "l1_distance": (distance, ("draft_logits", "aligned_target_logits", "active", *OF_ROWS)),
    "token_log_prob": (log_prob, ("draft_logits", "target_ids", "active", *OF_ROWS)),
    "loss_denominators": (denominators, ("eval_masks", "loss_decay_gamma", "process_group")),
    "AcceptanceMeter": (meter, ("block_size", "terms", "state", "process_group")),
}
# Right in itself, or refused by PyTorch: what the meter's other arguments then do not fit, more
# positions than there can be, a float8 product, the memory of a tensor of zeros that has none.
EXEMPT = {
    ("block_size", 1),
    ("block_size", 2),
    ("block_size", 4),
    ("draft_logits", 42),
    ("aligned_target_logits", 59),
}
# What a function calls the argument that others call so.
ALIASES = {
    "aligned_target_logits": ("target_logits",),
    "draft_logits": ("logits",),
    "target_ids": ("ids",),
    "state": ("sums", "checkpoint"),
}


def arguments_of(name: str) -> dict[str, Any]:
    arguments = plain()
    if name == "AcceptanceMeter":
        made = types.SimpleNamespace(**_taken(arguments, OUTPUTS))
        alphas = _taken(arguments, ALPHAS)
        _, arguments["terms"] = dspark_ext.compute_dspark_loss(
            outputs=made, return_terms=True, **alphas
        )
        window = dspark_ext.AcceptanceMeter(4)
        window.update(arguments["terms"])
        arguments["state"] = window.state_dict()
    return arguments


# --- Wrong arguments -----------------------------------------------------------------------------


class Subclass(Tensor):
    """A tensor with a class of its own."""


class Hostile:
    """Whatever is asked of it, it raises."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name} here")


def _freed(x: Tensor) -> Tensor:
    x = x.detach().clone()
    x.untyped_storage().resize_(0)
    return x


def _cut_short(x: Tensor) -> Tensor:
    x = x.detach().clone()
    x.untyped_storage().resize_(4)
    return x


def _negated(x: Tensor) -> Tensor:
    return torch._neg_view(x.detach()) if x.is_floating_point() else x


def _far(x: Tensor) -> Tensor:
    """A huge shape over very little memory."""
    return x.detach().flatten()[:1].expand(1 << 40)


OTHERS: list[Callable[[], Any]] = [
    lambda: None,
    lambda: True,
    lambda: 3,
    lambda: -1,
    lambda: 2**70,
    lambda: 2.5,
    lambda: float("nan"),
    lambda: float("inf"),
    lambda: 1j,
    lambda: "text",
    lambda: b"bytes",
    lambda: (),
    lambda: [1.0, 2.0],
    lambda: [[None]],
    lambda: {},
    lambda: {"block_size": 4, "sums": [1.0]},
    lambda: {"block_size": 4, "sums": torch.zeros(3)},
    lambda: object,
    lambda: Hostile(),
    lambda: torch.float32,
    lambda: torch.device("cpu"),
    lambda: numpy.ones(SHAPE, numpy.float32),
    lambda: numpy.float32(2.0),
    lambda: iter([]),
    lambda: torch.tensor(1.0),
    lambda: torch.empty(0),
    lambda: torch.ones(1),
    lambda: torch.ones(2, 3),
    lambda: torch.ones(*SHAPE),
    lambda: torch.ones(*SHAPE, V),
    lambda: torch.ones(*SHAPE, V - 1),
    lambda: torch.ones(2, 3, 4, 5, 6),
    lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)]),
    lambda: [torch.ones(*SHAPE), torch.ones(*SHAPE, dtype=torch.complex64)],
    lambda: [torch.ones(*SHAPE), torch.ones(*SHAPE, device="meta")],
]
CHANGES: list[Callable[[Tensor], Any]] = [
    lambda x: x.detach().numpy(),
    lambda x: x.tolist(),
    lambda x: x[:0],
    lambda x: x[..., :-1],
    lambda x: x[..., None],
    lambda x: torch.cat([x, x]),
    lambda x: x.to(torch.complex64),
    lambda x: x.to(torch.float8_e4m3fn),
    lambda x: x.to(torch.uint16),
    lambda x: x.to(torch.int64),
    lambda x: x.to(torch.bool),
    lambda x: x.to(torch.float16),
    lambda x: torch.quantize_per_tensor(x.detach().float(), 1.0, 0, torch.qint8),
    lambda x: x.detach().to_sparse(),
    lambda x: x.detach().float().to_mkldnn(),
    lambda x: x.detach().to("meta"),
    lambda x: x.detach().as_subclass(Subclass),
    lambda x: torch.nn.Parameter(x.detach(), requires_grad=x.is_floating_point()),
    lambda x: x.detach().float().requires_grad_(),
    lambda x: x.expand(2, *x.shape),
    lambda x: x.mT if x.dim() > 1 else x,
    lambda x: torch.as_strided(x.detach(), x.shape, (0,) * x.dim()),
    _negated,
    _far,
    lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    lambda x: x.detach().double().mul(-1).to(x.dtype),
    lambda x: x.detach().double().mul(1e300).to(x.dtype),
]


def ways(right: Any, without_memory: bool = True) -> list[Callable[[], Any]]:
    """Values that a function may be given in the place of a right one."""
    found = list(OTHERS)
    if isinstance(right, Tensor):
        found += [lambda change=change: change(right) for change in CHANGES]
        found += [lambda: _freed(right), lambda: _cut_short(right)] if without_memory else []
    return found


# --- Calls ---------------------------------------------------------------------------------------

# What a caller can act on. Anything else is a mistake that the package made itself.
EXPECTED = (TypeError, ValueError, LookupError, AttributeError, RuntimeError, OverflowError)
UNEXPECTED = (RecursionError,)


def attempt(function: Callable[..., None], arguments: dict[str, Any]) -> str:
    """Type and message of what a call raised; empty if it raised nothing."""
    try:
        function(arguments)
    except Exception as error:
        kind = "" if isinstance(error, EXPECTED) and not isinstance(error, UNEXPECTED) else "!"
        return f"{kind}{type(error).__name__}: {error}"
    return ""


def one_at_a_time(name: str, notes: str) -> list[list[str]]:
    """``[argument, way, error]`` of every call that raised."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    function, names = FUNCTIONS[name]
    found = []
    with open(notes, "w") as file:
        for argument in names:
            for i in range(len(ways(arguments_of(name)[argument]))):
                arguments = arguments_of(name)
                file.write(f"misuse.call({name!r}, {argument!r}, {i})\n")
                file.flush()
                try:
                    arguments[argument] = ways(arguments[argument])[i]()
                except Exception:
                    continue  # there is no such tensor of this dtype or shape
                if error := attempt(function, arguments):
                    found.append([argument, str(i), error])
    return found


def call(name: str, argument: str, way: int) -> None:
    """One call of ``one_at_a_time`` again."""
    arguments = arguments_of(name)
    arguments[argument] = ways(arguments[argument])[way]()
    FUNCTIONS[name][0](arguments)


def at_random(seed: int, count: int, notes: str) -> list[str]:
    """Calls with up to four wrong arguments; those whose errors are mistakes of the package."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = []
    with open(notes, "w") as file:
        for i in range(count):
            file.write(f"misuse.random_call({seed}, {i})\n")
            file.flush()
            error = random_call(seed, i)
            if error.startswith("!"):
                found.append(f"misuse.random_call({seed}, {i}): {error}")
    return found


def random_call(seed: int, i: int) -> str:
    draw = random.Random(f"{seed} {i}")
    name = draw.choice([*FUNCTIONS])
    function, names = FUNCTIONS[name]
    arguments = arguments_of(name)
    arguments["impl"] = draw.choice(["auto", "kernel", "torch"])
    for argument in draw.sample(names, min(len(names), draw.randint(1, 4))):
        try:
            arguments[argument] = draw.choice(ways(arguments[argument]))()
        except Exception:
            continue
    return attempt(function, arguments)


def reference_blocks(notes: str) -> list[str]:
    """The reference's building blocks, with every wrong argument but a tensor without memory,
    which PyTorch's own operations read."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    made = outputs(1, (*SHAPE, V))
    weights = torch.rand(*SHAPE)
    l1 = torch.rand(*SHAPE)
    terms, _ = reference_names._collect_local_terms(
        outputs=made, loss_decay_gamma=4.0, l1_loss_alpha=0.7
    )
    draft, target = made.draft_logits, made.aligned_target_logits
    blocks: dict[str, dict[str, Any]] = {
        "_build_loss_weight_mask": dict(
            eval_mask=made.eval_mask,
            block_size=4,
            device="cpu",
            loss_decay_gamma=4.0,
            dtype=torch.float32,
        ),
        "_l1_probability_distance_chunk": dict(draft_logits=draft, target_logits=target),
        "_compute_l1_dist_per_token": dict(draft_logits=draft, aligned_target_logits=target),
        "_compute_accept_rate_3d": dict(l1_dist_per_token=l1),
        "_compute_local_l1_term": dict(l1_dist_per_token=l1, loss_weight_mask=weights),
        "_collect_acceptance_diagnostics": dict(
            outputs=made, accept_rate_3d=l1, loss_weight_mask=weights, has_confidence=True
        ),
        "_collect_local_terms": dict(outputs=made, loss_decay_gamma=4.0, l1_loss_alpha=0.7),
        "_all_reduce_loss_denominators": dict(loss_terms=terms, world_size=1),
    }
    found = []
    with open(notes, "w") as file:
        for name, arguments in blocks.items():
            for argument, right in arguments.items():
                for i, way in enumerate(ways(right, without_memory=False)):
                    file.write(f"{name}: {argument}, way {i}\n")
                    file.flush()
                    try:
                        value = way()
                    except Exception:
                        continue
                    changed = {**arguments, argument: value}
                    error = attempt(
                        lambda arguments, name=name: getattr(reference_names, name)(**arguments),
                        changed,
                    )
                    if error.startswith("!"):
                        found.append(f"{name}, {argument}, way {i}: {error}")
    return found


if __name__ == "__main__":
    import json

    print(json.dumps(globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))))
