"""Held-out documents in the training text: by their ids, and by their tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dwslm.data.held_out import check_held_out, copies
from dwslm.data.shards import Dataset
from tests.data.in_memory import dataset


def with_ids(text: Dataset, ids: list[int]) -> Dataset:
    text.docs["id_hash"] = ids
    return text


def of_tokens(documents: list[list[int]], shards: int = 1, first_id: int = 0) -> Dataset:
    """Documents of given tokens, a byte each."""
    text = dataset([("ab"[n % 2], len(tokens)) for n, tokens in enumerate(documents)], shards=shards)
    text.docs["bytes"] = text.docs["tokens"]
    text.docs["id_hash"] += np.uint64(first_id)
    flat = np.array([token for tokens in documents for token in tokens], np.uint32)
    done = 0
    for shard in text._shards:
        shard[:] = flat[done : done + len(shard)]
        done += len(shard)
    return text


def test_a_held_out_document_in_training_is_refused_with_the_numbers() -> None:
    train = with_ids(dataset([("a", 10), ("b", 7), ("b", 5)]), [11, 12, 13])
    assert check_held_out(train, with_ids(dataset([("a", 3), ("b", 4)]), [21, 22])) is None
    valid = with_ids(dataset([("a", 3), ("b", 4), ("b", 2)]), [13, 22, 12])
    for allow in (False, True):  # copies may be allowed, the document itself may not
        with pytest.raises(
            ValueError, match=r"2 of the 3 held-out.*12 tokens of .*document 1 of source 'b', document 2 of"
        ):
            check_held_out(train, valid, allow_copies=allow)


def test_a_text_under_another_id_is_refused_with_the_numbers_or_allowed_with_a_note() -> None:
    train = of_tokens([[1, 2, 3], [4, 5], [1, 2, 3], [7], [1, 2, 3, 4]], shards=2)
    valid = of_tokens([[9, 9], [1, 2, 3], [5, 4], [7]], first_id=100)
    message = r"^2 of the 4 held-out .* byte for byte under other ids \(7 tokens of memory: document 0 of source 'a', "
    with pytest.raises(ValueError, match=message + r"document 2 of source 'a', document 3 .*--dedup.*allow_held_out"):
        check_held_out(train, valid)
    said = check_held_out(train, valid, allow_copies=True)
    assert said is not None and said.startswith("2 of the 4 held-out documents")


def test_same_size_and_same_ends_are_not_enough() -> None:
    train = of_tokens([[1, 2, 3, 4, 5, 6, 7], [1, 9, 3, 4, 5, 6, 7]])
    assert not len(copies(train, of_tokens([[1, 8, 3, 4, 5, 6, 7]])).train)  # first, middle and last are alike
    longer = of_tokens([[1, 2, 3, 4, 5, 6, 7]])
    longer.docs["bytes"] += np.uint32(1)
    assert not len(copies(train, longer).train)
    assert copies(train, of_tokens([[1, 9, 3, 4, 5, 6, 7]])).train.tolist() == [1]


FEW = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=4, max_size=12)


@given(FEW, FEW, st.integers(1, 3))
def test_what_is_found_is_what_comparing_all_with_all_finds(trained, held_out, shards) -> None:
    found = copies(of_tokens(trained, shards), of_tokens(held_out, first_id=100))
    assert found.train.tolist() == [doc for doc, text in enumerate(trained) if text in held_out]
    assert found.valid.tolist() == [doc for doc, text in enumerate(held_out) if text in trained]


def test_held_out_documents_of_one_text_or_id_are_all_counted() -> None:
    train = of_tokens([[1, 2, 3], [4, 5], [1, 2, 3]])
    valid = of_tokens([[1, 2, 3], [9], [1, 2, 3], [1, 2, 3]], first_id=100)
    with pytest.raises(ValueError, match=r"^3 of the 4 held-out .* other ids \(6 tokens of "):
        check_held_out(train, valid)
    twice = with_ids(dataset([("a", 3), ("b", 4), ("b", 2)]), [13, 22, 13])
    with pytest.raises(ValueError, match=r"^2 of the 3 held-out .* \(7 tokens of "):
        check_held_out(with_ids(dataset([("a", 10), ("b", 7)]), [11, 13]), twice)
