"""The model as the scorer sees it: batches of numpy in, nats of numpy out."""

from collections.abc import Callable

import numpy as np
import torch

from dwslm.data.batch import Batch
from dwslm.model.lm import LanguageModel


def nats_function(model: LanguageModel) -> Callable[[Batch], np.ndarray]:
    """A function from a packed batch to float32 nats [tokens], run on the model's device."""
    device = model.embedding.weight.device

    def nats(batch: Batch) -> np.ndarray:
        tokens = torch.from_numpy(batch.tokens).to(device, torch.int64)
        targets = torch.from_numpy(batch.targets).to(device, torch.int64)
        cu_seqlens = torch.from_numpy(batch.cu_seqlens).to(device)
        return model.nats(tokens, targets, cu_seqlens, batch.context).cpu().numpy()

    return nats
