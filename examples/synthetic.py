"""A made-up language with its target model, so small that a drafter learns it in seconds.

The target's last hidden state at a token is a rotation of the token's embedding, its next-token
distribution is ``softmax(head @ hidden)``, and the text is sampled from that: what a real target
would be run over a corpus for, computed here while the example starts. The drafter is the demo's
(``dspark_ext.demo.drafter``), which needs torch alone.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from dspark_ext.demo.drafter import Batch, Drafter, DrafterConfig

VOCABULARY, WIDTH, BLOCK_SIZE = 256, 32, 5
WINDOW, ANCHORS = 40, 6

SETTINGS = dict(
    loss_decay_gamma=4.0, ce_loss_alpha=0.1, l1_loss_alpha=0.9, confidence_head_alpha=1.0
)
"""The objective, the same in every example."""


def head() -> Tensor:
    """The target's head and embedding ``[V, D]``."""
    return torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(1))


def make_drafter(seed: int = 0) -> Drafter:
    """An untrained drafter for this target; the same for a seed, on every rank."""
    torch.manual_seed(seed)
    config = DrafterConfig(
        hidden=WIDTH,
        heads=2,
        kv_heads=2,
        mlp=64,
        rope_theta=10_000.0,
        norm_eps=1e-5,
        features=2,
        layers=1,
        block_size=BLOCK_SIZE,
        markov_rank=16,
    )
    return Drafter(config, head())


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of text with the target's hidden states and the anchors to draft from.

    An item is a dict of tensors, so that any collator stacks it; ``Batch(**items)`` is then what
    the drafter takes. ``first`` keeps training and held-out windows apart.
    """

    def __init__(self, count: int, first: int = 0) -> None:
        weight = head()
        turn, _ = torch.linalg.qr(
            torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(2))
        )
        hidden = 1.2 * weight @ turn  # of every token: [V, D]
        following = (hidden @ weight.T).softmax(-1)
        random = torch.Generator().manual_seed(3 + first)
        tokens = [torch.randint(VOCABULARY, (count,), generator=random)]
        for _ in range(WINDOW - 1):
            drawn = torch.multinomial(following[tokens[-1]], 1, generator=random)
            tokens.append(drawn.squeeze(-1))
        self.input_ids = torch.stack(tokens, dim=1)
        self.last_hidden = hidden[self.input_ids]
        self.features = torch.stack([weight[self.input_ids], self.last_hidden], dim=2)
        # A real document may end within a window; one in four does here.
        self.lengths = torch.full((count,), WINDOW)
        self.lengths[::4] = torch.randint(
            WINDOW // 2, WINDOW, (len(self.lengths[::4]),), generator=random
        )
        keys = torch.rand(count, WINDOW, generator=random)
        places = torch.arange(WINDOW)
        # An anchor has a token before it and one after it.
        allowed = (places >= 1) & (places < self.lengths[:, None] - 1)
        self.anchors = torch.where(allowed, keys, -1.0).topk(ANCHORS, dim=1).indices

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "input_ids": self.input_ids[index],
            "lengths": self.lengths[index],
            "features": self.features[index],
            "last_hidden": self.last_hidden[index],
            "anchors": self.anchors[index],
            "keep": torch.ones(ANCHORS, dtype=torch.bool),
        }


def to_device(items: dict[str, Tensor], device: torch.device) -> Batch:
    """A collated dict as the drafter's batch."""
    return Batch(**{name: values.to(device) for name, values in items.items()})
