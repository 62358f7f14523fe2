"""Stands in for DeepSpec, which has no release: its names, keywords, metrics and mathematics, in
plain PyTorch and nobody else's words."""
