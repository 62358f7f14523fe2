"""One training step in each installable trainer, through the trainer's own code."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any, Callable

import torch
from torch import Tensor, nn

HIDDEN = 64
K = 7


@dataclasses.dataclass
class Step:
    """A small drafter in its trainer, ready to be run as often as one likes.

    Attributes:
        trainer: the trainer's name in ``dspark_ext.integrations``.
        what: the trainer's code that runs, for the documentation.
        module: the trainer's module, whose settings a test may change.
        parameters: what the loss is differentiated by.
        forward: the loss and everything else that the trainer reports.
    """

    trainer: str
    what: str
    module: nn.Module
    parameters: dict[str, nn.Parameter]
    forward: Callable[[], tuple[Tensor, dict[str, Tensor]]]

    def run(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """``(values, gradients)`` of a step; anchors are drawn from the same seed each time."""
        for parameter in self.parameters.values():
            parameter.grad = None
        torch.manual_seed(1)
        loss, values = self.forward()
        loss.backward()
        gradients = {
            name: parameter.grad.clone()
            for name, parameter in self.parameters.items()
            if parameter.grad is not None
        }
        return {"loss": loss.detach(), **values}, gradients


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def spread(module: nn.Module) -> None:
    """Weights with which logits differ by several units, as a trained model's do."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                scale = 1.0 if "markov" in name else 2.5 / parameter.shape[-1] ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(vocab: int, *shape: int) -> Tensor:
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(3))


def loss_mask(batch: int, length: int) -> Tensor:
    """All but a prompt, the tail of the second sample and a gap inside blocks."""
    mask = torch.ones(batch, length)
    mask[:, :3] = 0
    mask[1:, -5:] = 0
    mask[:, length // 2] = 0
    return mask


def qwen3_config(vocab: int, layers: int) -> Any:
    return importlib.import_module("transformers").Qwen3Config(
        vocab_size=vocab,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
    )


class Arguments(dict):
    """NeMo AutoModel reads its model arguments as keys and as attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def nemo_automodel(vocab: int, anchors: int, dtype: torch.dtype = torch.float32) -> Step:
    dspark = importlib.import_module("nemo_automodel.components.speculative.dspark")
    core = importlib.import_module("nemo_automodel.components.speculative.dspark.core")
    config = dspark.build_draft_config(
        qwen3_config(vocab, 4),
        Arguments(
            num_draft_layers=2,
            target_layer_ids=[0, 2],
            block_size=K,
            mask_token_id=5,
            num_anchors=anchors,
            markov_rank=16,
            markov_head_type="vanilla",
            confidence_head_alpha=1.0,
            confidence_head_with_markov=True,
        ),
    )
    config._attn_implementation = "sdpa"  # the default needs a GPU
    drafter = dspark.Qwen3DSparkModel(config).to(dtype)
    spread(drafter)
    drafter.set_embedding_head_trainable(False)
    module = core.DSparkTrainerModule(drafter, loss_decay_gamma=4.0)
    length = anchors + 16
    batch = {
        "input_ids": tokens(vocab, 2, length),
        "target_hidden_states": normal(4, 2, length, 2 * HIDDEN).to(dtype),
        "loss_mask": loss_mask(2, length).to(torch.uint8),
        "target_last_hidden_states": normal(5, 2, length, HIDDEN).to(dtype),
    }

    def forward() -> tuple[Tensor, dict[str, Tensor]]:
        metrics = dict(vars(module(**batch)))
        return metrics.pop("loss"), metrics

    what = "`DSparkTrainerModule(Qwen3DSparkModel)`"
    return Step("nemo_automodel", what, module, trainable(drafter), forward)


def modelopt(vocab: int, anchors: int) -> Step:
    transformers = importlib.import_module("transformers")
    speculative = importlib.import_module("modelopt.torch.speculative")
    importlib.import_module("modelopt.torch.speculative.plugins.hf_dspark")
    model = transformers.Qwen3ForCausalLM(qwen3_config(vocab, 4))
    architecture = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 2 * HIDDEN,
        "projector_type": "dspark",
        "markov_rank": 16,
        "use_confidence_head": True,
    }
    speculative.convert(
        model,
        [
            (
                "dflash",
                {
                    "dflash_block_size": K,
                    "dflash_num_anchors": anchors,
                    "dflash_mask_token_id": 5,
                    "dflash_use_torch_compile": False,
                    "dflash_loss_objective": "decay",
                    "dflash_loss_decay_factor": 4.0,
                    "dflash_confidence_head_alpha": 1.0,
                    "dflash_architecture_config": architecture,
                },
            )
        ],
    )
    model.train()
    spread(model)
    length = (anchors + 16) // K * K
    ids = tokens(vocab, 2, length)
    mask = loss_mask(2, length)

    def forward() -> tuple[Tensor, dict[str, Tensor]]:
        output = model(
            input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, loss_mask=mask
        )
        metrics = {"accuracy": output.train_acc[0][0], **output.dspark_metrics}
        return output.loss, {name: torch.tensor(value) for name, value in metrics.items()}

    return Step("modelopt", "`HFDSparkModel.forward`", model, trainable(model), forward)


def speculators(vocab: int, anchors: int) -> Step:
    """With its fused losses where the patch is active. They need Triton otherwise, so that the
    eager ones, the reference that they are tested against, stand in for them."""
    package = importlib.import_module("speculators")
    losses = importlib.import_module("speculators.losses.utils")
    greedy = importlib.import_module("speculators.proposals.greedy")
    config = qwen3_config(vocab, 2)
    config._attn_implementation = "eager"
    model = package.DSparkDraftModel(
        package.DSparkSpeculatorConfig(
            transformer_layer_config=config,
            draft_vocab_size=vocab,
            block_size=K,
            aux_hidden_state_layer_ids=[1, 3],
            mask_token_id=5,
            markov_rank=16,
            speculators_config=package.SpeculatorsConfig(
                algorithm="dspark",
                proposal_methods=[greedy.GreedyTokenProposalConfig(speculative_tokens=K)],
                default_proposal_method="greedy",
                verifier=package.VerifierConfig(name_or_path=None, architectures=[]),
            ),
        )
    )
    spread(model)
    length = anchors + 16
    batch = {
        "hidden_states": normal(4, 1, length, 2 * HIDDEN),
        "input_ids": tokens(vocab, 1, length),
        "loss_mask": loss_mask(1, length),
        "verifier_last_hidden_states": normal(5, 1, length, HIDDEN),
        "document_ids": torch.zeros(1, length, dtype=torch.long),
    }

    def forward() -> tuple[Tensor, dict[str, Tensor]]:
        is_patched = hasattr(losses._fused_kernel, "__wrapped__")
        keywords, _ = model.get_trainer_kwargs(
            loss_fn='{"ce": 0.1, "tv": 0.9}',
            loss_implementation="fused" if is_patched else "eager",
            max_anchors=anchors,
        )
        _, loss, metrics = model(**batch, **keywords)
        return loss, metrics

    return Step("speculators", "`DSparkDraftModel.forward`", model, trainable(model), forward)


def specforge(vocab: int, anchors: int, chunk_blocks: int = 16) -> Step:
    family = importlib.import_module("specforge.algorithms.common.dflash_family_model")
    drafts = importlib.import_module("specforge.modeling.draft.dspark")
    config = qwen3_config(vocab, 2)
    config.num_target_layers = 4
    config.block_size = K
    config._attn_implementation = "sdpa"
    config.dflash_config = {
        "target_layer_ids": [1, 3],
        "mask_token_id": 5,
        "markov_rank": 16,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    drafter = drafts.DSparkDraftModel(config)
    spread(drafter)
    head, embedding = nn.Linear(HIDDEN, vocab, bias=False), nn.Embedding(vocab, HIDDEN)
    for module in (head, embedding):
        spread(module)
        module.requires_grad_(False)
    model = family.OnlineDSparkModel(
        draft_model=drafter,
        target_lm_head=head,
        target_embed_tokens=embedding,
        mask_token_id=5,
        block_size=K,
        attention_backend="sdpa",
        num_anchors=anchors,
        loss_decay_gamma=4.0,
        objective_chunk_blocks=chunk_blocks,
    )
    length = anchors + 16
    batch = {
        "input_ids": tokens(vocab, 2, length),
        "hidden_states": normal(4, 2, length, 2 * HIDDEN),
        "loss_mask": loss_mask(2, length),
        "target_last_hidden_states": normal(5, 2, length, HIDDEN),
    }

    def forward() -> tuple[Tensor, dict[str, Tensor]]:
        loss, accuracy, metrics = model(**batch)
        values = {"accuracy": accuracy, "accuracy_denom": metrics["accuracy_denom"]}
        for name, (numerator, denominator) in metrics["ratio_metrics"].items():
            values[f"{name}_num"], values[f"{name}_den"] = numerator, denominator
        return loss, values

    return Step("specforge", "`OnlineDSparkModel.forward`", model, trainable(drafter), forward)


def verl_speco(vocab: int, anchors: int, loss_mode: str = "full_vocab", chunk: int = 0) -> Step:
    backend = importlib.import_module("verl_speco.backends.dspark_trainer_backend")
    models = importlib.import_module("verl_speco.models.dspark")
    drafter = models.DSparkDraftModel(
        models.DSparkConfig(
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=vocab,
            max_position_embeddings=512,
            num_target_layers=4,
            num_context_layers=2,
            target_hidden_size=HIDDEN,
            target_num_hidden_layers=4,
            target_layer_ids=[1, 3],
            mask_token_id=5,
            block_size=K,
            markov_rank=16,
        )
    )
    spread(drafter)
    model = backend.DSparkTrainingModel(
        drafter,
        block_size=K,
        num_anchors=anchors,
        loss_mode=loss_mode,
        sampled_ce_negatives=vocab // 4,
        l1_chunk_size=chunk,
    )
    length = anchors + 16
    hidden = normal(4, 2, length, 2 * HIDDEN)
    batch = {
        "input_ids": tokens(vocab, 2, length),
        "hidden_states_list": list(hidden.split(HIDDEN, dim=-1)),
        "loss_mask": loss_mask(2, length),
        "lm_head_weight": normal(6, vocab, HIDDEN) * 2.5 / HIDDEN**0.5,
        "target_last_hidden_states": normal(5, 2, length, HIDDEN),
    }

    def forward() -> tuple[Tensor, dict[str, Tensor]]:
        loss, accuracy, loss_pp, accuracy_pp, count_pp, diagnostics = model(**batch)
        values = {"accuracy": accuracy, "loss_pp": loss_pp, "accuracy_pp": accuracy_pp}
        return loss, {**values, "count_pp": count_pp, **diagnostics}

    return Step("verl_speco", "`DSparkTrainingModel.forward`", model, trainable(drafter), forward)


STEPS: dict[str, Callable[..., Step]] = {
    "nemo_automodel": nemo_automodel,
    "modelopt": modelopt,
    "speculators": speculators,
    "specforge": specforge,
    "verl_speco": verl_speco,
}
