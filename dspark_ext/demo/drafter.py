"""A block-parallel drafter, and how the inputs of the DSpark loss are made, as logits or as
hidden states with the heads that are to be applied to them.

At an anchor `i` the drafter knows the tokens up to `x_i` and the target's hidden states of the
positions *before* `i`. (Decoding is in the same place: the target has just produced `x_i`, and
has not read it yet.) In one pass it proposes the next `K` tokens:

    position k of the block       0         1         2        ...
    block input                   x_i       mask      mask     ...
    its previous token            x_i       x_i+1     x_i+2    ...   read by the Markov head only
    target id                     x_i+1     x_i+2     x_i+3    ...
    teacher: the target's         h_i       h_i+1     h_i+2    ...   @ head.T
      last hidden state

The positions of a block attend to one another in both directions, and to the context before the
anchor; no tokens of the text past the anchor enter them, which is why one pass will do. What
that leaves out, which token was drafted just before, the Markov head adds to the logits
afterwards: a correction from the previous token alone, of low rank, cheap to apply token by
token. In training that token is the text's own; in decoding it is the one just drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark_ext import DSparkForwardOutput, DSparkLinearOutput


@dataclass
class DrafterConfig:
    """Sizes. The layers have the form of the target's, so most of these are the target's too."""

    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    rope_theta: float
    norm_eps: float
    features: int
    """Hidden states of the target given for each token of the context; the last one listed is
    that of the latest layer."""
    layers: int = 2
    block_size: int = 7
    markov_rank: int = 64


@dataclass
class Batch:
    """`B` windows of text with the target's hidden states, and `A` anchors in each."""

    input_ids: Tensor
    """[B, S] int64."""
    lengths: Tensor
    """[B] int64: the tokens of each window that are text; the rest is padding."""
    features: Tensor
    """[B, S, L, D]: hidden states of L of the target's layers."""
    last_hidden: Tensor
    """[B, S, D]: after the target's final norm, what its head reads."""
    anchors: Tensor
    """[B, A] int64 positions in the window."""
    keep: Tensor
    """[B, A] bool: false where a window was too short for one more anchor."""


def at(values: Tensor, positions: Tensor) -> Tensor:
    """`values[b, positions[b, ...]]`: [B, S, *] read at [B, *P] gives [B, *P, *]."""
    batch = torch.arange(len(values), device=values.device)
    return values[batch.view(-1, *[1] * (positions.dim() - 1)), positions]


def align(batch: Batch, block_size: int) -> tuple[Tensor, Tensor]:
    """Where each block stands in the text, and which of its positions count.

    Returns:
        positions: [B, A, K + 1] int64, `i, i+1, ..., i+K`. Its first K are those of the previous
            tokens and of the teacher, its last K those of the target ids. Positions past the
            window are moved to its last slot: they must be readable, and are masked.
        eval_mask: [B, A, K] bool, true where the target id is text. A block that reaches past
            the end of its document keeps its first positions.
    """
    steps = torch.arange(block_size + 1, device=batch.anchors.device)
    positions = batch.anchors[..., None] + steps
    eval_mask = (positions[..., 1:] < batch.lengths[:, None, None]) & batch.keep[..., None]
    return positions.clamp(max=batch.input_ids.shape[1] - 1), eval_mask


class Drafter(nn.Module):
    """Proposes `K` tokens per anchor; `forward` returns what `compute_dspark_loss` takes, or
    `compute_dspark_linear_loss`."""

    head: Tensor

    def __init__(self, config: DrafterConfig, head: Tensor, linear: bool = False) -> None:
        """
        Args:
            config: sizes.
            head: [V, D], the target's head, shared and frozen. It serves as the token embedding
                too, as in a target whose embedding and head are tied.
            linear: whether hidden states are handed on, in place of logits.
        """
        super().__init__()
        self.config, self.linear = config, linear
        vocabulary, width = head.shape
        self.register_buffer("head", head.detach(), persistent=False)

        self.fuse = nn.Linear(config.features * width, width, bias=False)
        self.mask_token = nn.Parameter(torch.randn(width))
        self.from_token = nn.Linear(width, width, bias=False)
        self.from_context = nn.Linear(width, width, bias=False)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.layers)])
        self.norm = nn.RMSNorm(width, eps=config.norm_eps)
        # The Markov head: logits of the next token from the previous one, through `rank` numbers.
        self.markov_in = nn.Embedding(vocabulary, config.markov_rank)
        self.markov_out = nn.Linear(config.markov_rank, vocabulary, bias=False)
        self.confidence = nn.Linear(width + config.markov_rank, 1)

        # A start from which training gets going at once: the context is the target's late hidden
        # state as it is, a block starts from the last one known, and the heads that are new say
        # nothing yet.
        nn.init.zeros_(self.fuse.weight)
        nn.init.eye_(self.from_context.weight)
        nn.init.zeros_(self.markov_out.weight)
        nn.init.zeros_(self.confidence.weight)
        self.markov_in.weight.data.copy_(principal_components(head, config.markov_rank))

    def start_from(self, final_norm: Tensor, layers: Sequence[dict[str, Tensor]]) -> None:
        """Starts from the target's own final norm [D] and last layers (their state dicts)."""
        self.norm.weight.data.copy_(final_norm)
        for layer, weights in zip(self.layers, layers):
            # "self_attn.q_proj.weight" is "q_proj.weight" here.
            layer.load_state_dict({".".join(n.split(".")[-2:]): w for n, w in weights.items()})

    def hidden_states(self, batch: Batch) -> Tensor:
        """Runs all blocks of all windows in one pass: [B, A, K, D], ready for the head.

        Reads the text up to each anchor and nothing after it.
        """
        (b, a), k, d = batch.anchors.shape, self.config.block_size, self.config.hidden
        device = batch.anchors.device

        # The context: a late hidden state of the target, corrected by what the other layers know.
        features = F.rms_norm(batch.features, (d,)).flatten(2)
        context = batch.features[:, :, -1] + self.fuse(features)  # [B, S, D]

        # The block: the anchor's token and K - 1 masks, on top of the last hidden state known.
        anchor_token = F.embedding(at(batch.input_ids, batch.anchors), self.head)
        anchor_token = F.rms_norm(anchor_token, (d,))[:, :, None]  # [B, A, 1, D]
        masks = self.mask_token.expand(b, a, k - 1, d)
        known = at(context, (batch.anchors - 1).clamp(min=0))[:, :, None]
        block = self.from_token(torch.cat([anchor_token, masks], dim=2)) + self.from_context(known)
        x = block.reshape(b, a * k, d)

        # Keys are the context, then every block. A block sees the context before its anchor, and
        # of the blocks itself.
        block_positions = batch.anchors[..., None] + torch.arange(k, device=device)
        block_positions = block_positions.view(b, a * k)
        context_positions = torch.arange(context.shape[1], device=device)
        sees_context = context_positions < batch.anchors.repeat_interleave(k, dim=1)[..., None]
        owner = torch.arange(a, device=device).repeat_interleave(k)
        sees_block = (owner[:, None] == owner).expand(b, -1, -1)
        mask = torch.cat([sees_context, sees_block], dim=2)  # [B, A*K, S + A*K]
        positions = torch.cat([context_positions.expand(b, -1), block_positions], dim=1)
        rotation = rotary(positions, d // self.config.heads, self.config.rope_theta)
        for layer in self.layers:
            x = layer(x, context, mask, rotation)
        return self.norm(x).view(b, a, k, d)

    def forward(self, batch: Batch) -> DSparkForwardOutput | DSparkLinearOutput:
        """Everything the loss needs, for B windows of A anchors each."""
        positions, eval_mask = align(batch, self.config.block_size)
        tokens = at(batch.input_ids, positions)  # [B, A, K + 1]
        previous, target_ids = tokens[..., :-1], tokens[..., 1:]

        hidden = self.hidden_states(batch)
        markov = self.markov_in(previous)  # [B, A, K, R]
        teacher = at(batch.last_hidden, positions[..., :-1])
        confidence_pred = self.confidence(torch.cat([hidden, markov], dim=-1)).squeeze(-1)
        if self.linear:
            return DSparkLinearOutput(
                draft_hidden=hidden,
                lm_head_weight=self.head,
                target_ids=target_ids,
                eval_mask=eval_mask,
                block_keep_mask=batch.keep,
                confidence_pred=confidence_pred,
                markov_features=markov,
                markov_weight=self.markov_out.weight,
                target_hidden=teacher,
            )
        # One [N, V] tensor, not two: the second product is added to the first in place.
        draft_logits = (hidden.flatten(0, 2) @ self.head.T).addmm_(
            markov.flatten(0, 2), self.markov_out.weight.T
        )
        with torch.no_grad():
            aligned_target_logits = teacher @ self.head.T
        return DSparkForwardOutput(
            draft_logits=draft_logits.view(*target_ids.shape, -1),
            target_ids=target_ids,
            eval_mask=eval_mask,
            block_keep_mask=batch.keep,
            confidence_pred=confidence_pred,
            aligned_target_logits=aligned_target_logits,
        )


class Layer(nn.Module):
    """A Llama layer whose queries are the blocks', and whose keys are the context's as well.

    The parameters bear the target's names, so that its weights load.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        width, head_width = config.hidden, config.hidden // config.heads
        self.head_width = head_width
        self.input_layernorm = nn.RMSNorm(width, eps=config.norm_eps)
        self.q_proj = nn.Linear(width, config.heads * head_width, bias=False)
        self.k_proj = nn.Linear(width, config.kv_heads * head_width, bias=False)
        self.v_proj = nn.Linear(width, config.kv_heads * head_width, bias=False)
        self.o_proj = nn.Linear(config.heads * head_width, width, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=config.norm_eps)
        self.gate_proj = nn.Linear(width, config.mlp, bias=False)
        self.up_proj = nn.Linear(width, config.mlp, bias=False)
        self.down_proj = nn.Linear(config.mlp, width, bias=False)

    def forward(
        self, x: Tensor, context: Tensor, mask: Tensor, rotation: tuple[Tensor, Tensor]
    ) -> Tensor:
        """x [B, T, D], context [B, S, D], mask [B, T, S + T] bool, true where seen."""
        own = slice(context.shape[1], None)
        cos, sin = rotation
        keys = self.input_layernorm(torch.cat([context, x], dim=1))
        q = rotate(self.split(self.q_proj(keys[:, own])), cos[:, :, own], sin[:, :, own])
        k = rotate(self.split(self.k_proj(keys)), cos, sin)
        v = self.split(self.v_proj(keys))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], enable_gqa=True)
        x = x + self.o_proj(seen.transpose(1, 2).flatten(2))
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))

    def split(self, x: Tensor) -> Tensor:
        """[B, T, H * d] to [B, H, T, d]."""
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


def rotary(positions: Tensor, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary embedding, [B, 1, T, width / 2] each, for positions [B, T]."""
    frequencies = theta ** (-torch.arange(0, width, 2, device=positions.device) / width)
    angles = positions[:, None, :, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the two halves of the last dimension of x [B, H, T, d] by each position's angles."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def principal_components(embedding: Tensor, rank: int) -> Tensor:
    """The `rank` strongest directions of an embedding [V, D], as unit-variance codes [V, rank].

    A start for the Markov head in which similar tokens are similar, so that what it learns about
    the few thousand tokens of a short text is shared among them.
    """
    centred = embedding - embedding.mean(dim=0)
    _, axes = torch.linalg.eigh(centred.T @ centred)  # ascending eigenvalues
    codes = centred @ axes[:, -rank:]
    return codes / codes.std()
