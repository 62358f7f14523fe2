from deepspec.modeling.dspark.loss import compute_dspark_loss

__all__ = ["compute_dspark_loss"]
