"""Value embeddings: a table looked up by token id adds to a mixer's values (after arXiv 2410.17897)."""

import torch
from torch import Tensor, nn

from dwslm.model.projection import Table


class ValueEmbedding(nn.Module):
    """One layer's table, [vocabulary, heads * head_dim], added to its values by a gate per head.

    The gate's logits come out of the layer's own input projection and start at zero, so every gate starts at 1.
    """

    def __init__(self, vocab_size: int, heads: int, head_dim: int):
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.table = Table(vocab_size, heads * head_dim, role="value_table")

    def forward(self, values: Tensor, gate_logits: Tensor, tokens: Tensor) -> Tensor:
        """values [T, heads, head_dim] + 2 sigmoid(gate_logits [T, heads]) * table[tokens [T]], in the values' dtype."""
        gate = 2 * torch.sigmoid(gate_logits.float())[:, :, None]
        extra = self.table(tokens).view(-1, self.heads, self.head_dim)
        return (values.float() + gate * extra).to(values.dtype)
