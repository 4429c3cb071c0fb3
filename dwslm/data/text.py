"""The text that rows are cut from: documents as they are stored, or with their tokens split anew in each epoch."""

import numpy as np
from numpy.typing import NDArray

from dwslm.data.order import derive_key
from dwslm.data.shards import Dataset
from dwslm.data.stochastok import SplitTable, expand, expanded_length

KEPT_TOKENS = 1 << 21  # of expanded documents; pieces of a long one are wanted in many rows of a window
SPLITS = 4  # what a key is for: the others are in windows.py


class Text:
    """The documents of a dataset, as training reads them.

    Args:
        dataset: the documents.
        proportion: splits per token (StochasTok); 0 leaves them as they are.
        table: the tokenizer's splits, needed where `proportion` is not 0.
        seed: decides the splits.

    Attributes:
        lengths: text tokens of each document, splits included, int64 [documents]; the same in every epoch.
    """

    def __init__(
        self, dataset: Dataset, *, proportion: float = 0.0, table: SplitTable | None = None, seed: int = 0
    ) -> None:
        assert (table is not None) == (proportion > 0)
        self.dataset, self.proportion, self._table, self._seed = dataset, proportion, table, seed
        self.lengths: NDArray[np.int64] = dataset.docs["tokens"].astype(np.int64)
        if table is not None:
            self.lengths = expanded_length(self.lengths, dataset.docs["bytes"], proportion)
        self._kept: dict[tuple[int, int], NDArray[np.int32]] = {}  # oldest first
        self._kept_tokens = 0

    def tokens(self, doc: int, epoch: int, start: int, stop: int) -> NDArray[np.integer]:
        """Tokens [start, stop) of a document in one reading of its source.

        Raises ValueError for a token that is not in the vocabulary, where it would be split anew.
        """
        if self._table is None:
            return self.dataset.tokens(doc, start, stop)
        whole = self._kept.get((doc, epoch))
        if whole is None:
            seed = derive_key(self._seed, SPLITS, doc, epoch)
            stored = self.dataset.tokens(doc)
            if int(stored.max()) >= self.dataset.vocab_size:
                raise self.dataset.foreign_token(doc)
            whole = expand(stored, int(self.lengths[doc]), self._table, seed)
            if stop - start < len(whole):
                self._keep((doc, epoch), whole)
        return whole[start:stop]

    def _keep(self, key: tuple[int, int], tokens: NDArray[np.int32]) -> None:
        self._kept[key] = tokens
        self._kept_tokens += len(tokens)
        while self._kept_tokens > KEPT_TOKENS and len(self._kept) > 1:
            self._kept_tokens -= len(self._kept.pop(next(iter(self._kept))))
