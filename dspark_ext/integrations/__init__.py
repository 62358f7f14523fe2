"""dspark_ext inside the trainers that people use, one line each.

``patch("nemo_automodel")`` replaces the loss of an installed trainer; docs/integrations.md says
for each of them what is replaced and what changes.
"""

from __future__ import annotations

from dspark_ext.integrations import (
    deepspec,
    megatron_bridge,
    modelopt,
    nemo_automodel,
    patching,
    specforge,
    speculators,
    verl_speco,
)
from dspark_ext.integrations.patching import Handle, IntegrationError, Trainer

_INTEGRATIONS = {
    module.INTEGRATION.name: module.INTEGRATION
    for module in (
        nemo_automodel,
        deepspec,
        megatron_bridge,
        modelopt,
        speculators,
        specforge,
        verl_speco,
    )
}


def patch(name: str) -> Handle:
    """Replaces a trainer's loss with this package's, in this process.

    Every global name of every loaded module that stands for a replaced function is exchanged, so
    it does not matter what was imported before. Patching twice is the same replacement with two
    handles; it ends with the last of them.

    Args:
        name: ``"nemo_automodel"``, ``"deepspec"``, ``"megatron_bridge"``, ``"modelopt"``,
            ``"speculators"``, ``"specforge"`` or ``"verl_speco"``.

    Returns:
        A handle whose ``undo()`` brings the originals back; as a context manager it does so at
        the end of the block. Without either, the trainer stays patched.

    Raises:
        ValueError: no trainer of that name is known.
        IntegrationError: the trainer is not installed, is of a version that this package does
            not know, or its functions are not where or what they are expected to be; the message
            says what was found and what was expected. Nothing is replaced then.
    """
    if name not in _INTEGRATIONS:
        raise ValueError(f"no trainer {name!r} is known; expected one of {list(_INTEGRATIONS)}")
    return patching.apply(_INTEGRATIONS[name])


def available() -> list[Trainer]:
    """The installed trainers among those that :func:`patch` knows.

    Found by their files and their version, without importing them. ``Trainer.problem`` says why
    one cannot be patched; :func:`patch` imports the trainer and checks its functions' signatures
    too.
    """
    found = [patching.find(integration) for integration in _INTEGRATIONS.values()]
    return [trainer for trainer in found if trainer is not None]


__all__ = ["Handle", "IntegrationError", "Trainer", "available", "patch"]
