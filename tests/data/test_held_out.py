import pytest

from dwslm.data.held_out import check_held_out
from dwslm.data.shards import Dataset
from tests.data.in_memory import dataset


def with_ids(text: Dataset, ids: list[int]) -> Dataset:
    text.docs["id_hash"] = ids
    return text


def test_a_held_out_document_in_training_is_refused_with_the_numbers() -> None:
    train = with_ids(dataset([("a", 10), ("b", 7), ("b", 5)]), [11, 12, 13])
    check_held_out(train, with_ids(dataset([("a", 3), ("b", 4)]), [21, 22]))
    valid = with_ids(dataset([("a", 3), ("b", 4), ("b", 2)]), [13, 22, 12])
    with pytest.raises(
        ValueError, match=r"2 of the 3 held-out.*12 tokens of .*document 1 of source 'b', document 2 of"
    ):
        check_held_out(train, valid)
