"""Pretraining of one small hybrid language model on one to eight GPUs."""

__version__ = "0.1.0"
