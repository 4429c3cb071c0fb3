from pathlib import Path

import numpy as np
import pytest

from dwslm.data.row_index import SAVE_EVERY, RowIndex

KEY = "0123456789abcdef" * 4
COUNTS = [3, 0, 2, 5]


def counted(folder: Path | None) -> RowIndex:
    index = RowIndex(KEY, folder)
    for count in COUNTS:
        index.append(count)
    index.save()
    return index


def test_find() -> None:
    index = counted(None)
    assert index.starts.tolist() == [0, 3, 3, 5, 10]
    assert index.rows == 10
    assert [index.find(row) for row in range(10)] == [0, 0, 0, 2, 2, 3, 3, 3, 3, 3]


def test_what_was_saved_is_read_again(tmp_path: Path) -> None:
    counted(tmp_path / "cache")
    index = RowIndex(KEY, tmp_path / "cache")
    assert index.starts.tolist() == [0, 3, 3, 5, 10]
    index.append(1)
    assert index.rows == 11
    assert index.warnings == []
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [f"rows-{KEY[:20]}.npz"]


def test_saved_now_and_then_by_itself(tmp_path: Path) -> None:
    index = RowIndex(KEY, tmp_path)
    for _ in range(SAVE_EVERY + 1):
        index.append(2)
    assert RowIndex(KEY, tmp_path).windows == SAVE_EVERY


def damaged(content: bytes) -> list[bytes]:
    flipped = bytearray(content)
    flipped[content.index(b"\x05\x00\x00\x00")] ^= 4  # a count of 5 becomes 1
    return [b"", b"not a zip", content[: len(content) // 2], bytes(flipped)]


@pytest.mark.parametrize("which", range(4))
def test_a_damaged_file_is_not_trusted_and_replaced(tmp_path: Path, which: int) -> None:
    path = counted(tmp_path).path
    assert path is not None
    path.write_bytes(damaged(path.read_bytes())[which])
    index = RowIndex(KEY, tmp_path)
    assert index.windows == 0
    assert len(index.warnings) == 1 and str(path) in index.warnings[0]
    counted(tmp_path)
    assert RowIndex(KEY, tmp_path).rows == 10


def test_a_file_that_does_not_match_its_checksum_or_key_is_not_trusted(tmp_path: Path) -> None:
    path = counted(tmp_path).path
    assert path is not None
    with np.load(path) as file:
        good = dict(file)
    for change in (
        {"counts": good["counts"] + np.uint32(1)},
        {"counts": good["counts"][:-1]},
        {"counts": good["counts"].astype(np.float64)},
        {"key": "f" * 64},
        {"sha256": "0" * 64},
    ):
        np.savez(path, **{**good, **change})
        index = RowIndex(KEY, tmp_path)
        assert index.windows == 0
        assert "counted anew" in index.warnings[0]


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    path = counted(tmp_path).path
    assert path is not None
    np.savez(path, key=KEY, counts=np.array([print], dtype=object), sha256="0")
    index = RowIndex(KEY, tmp_path)
    assert index.windows == 0 and len(index.warnings) == 1


def test_a_folder_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    index = counted(tmp_path / "file")
    index.append(1)
    index.save()
    assert index.rows == 11
    assert len(index.warnings) == 1
    assert "can't be kept" in index.warnings[0] and str(tmp_path / "file") in index.warnings[0]
