"""Output head and loss: cross-entropy of soft-capped logits, cap * tanh(head(h) / cap) (soft cap: arXiv 2408.00118)."""

from dwslm.ops.loss_head.chunked import token_nats, total_nats

IGNORE = -100

__all__ = ["IGNORE", "token_nats", "total_nats"]
