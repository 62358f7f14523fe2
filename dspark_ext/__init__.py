"""The DSpark training objective for PyTorch: one read of each logit, exact and reproducible."""

from importlib.metadata import PackageNotFoundError, version

from dspark_ext.distributed import loss_denominators
from dspark_ext.linear import DSparkLinearOutput, compute_dspark_linear_loss
from dspark_ext.loss import DSparkForwardOutput, DSparkLoss, compute_dspark_loss
from dspark_ext.metrics import AcceptanceMeter
from dspark_ext.rowwise import ce_and_l1, l1_distance, token_log_prob

try:
    __version__ = version("dspark_ext")
except PackageNotFoundError:  # imported from a source tree that was built but not installed
    __version__ = "0+unknown"

__all__ = [
    "AcceptanceMeter",
    "DSparkForwardOutput",
    "DSparkLinearOutput",
    "DSparkLoss",
    "ce_and_l1",
    "compute_dspark_linear_loss",
    "compute_dspark_loss",
    "l1_distance",
    "loss_denominators",
    "token_log_prob",
]
