import json
import shutil

import numpy as np
import pytest

from dwslm.data.shard_writer import ShardWriter, is_finished
from dwslm.data.shards import open_dataset


def writer(path, **settings):
    return ShardWriter(path, **{"vocab_size": 300, "eod": 299, "tokenizer_hash": "t", "shard_tokens": 3, **settings})


def add(to, number):
    to.add(
        np.full(1 + number % 3, number % 299),
        text_bytes=number + 1,
        source="zeta" if number % 2 else "alpha",
        language="en",
        id_hash=number,
        licence="MIT" if number % 5 else "",
    )


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.fixture
def straight(tmp_path):
    whole = writer(tmp_path / "straight")
    for number in range(20):
        add(whole, number)
    whole.finish(made_by={"by": "hand"}, licence_texts={"MIT": "text"})
    return contents(tmp_path / "straight")


@pytest.mark.parametrize("killed_after", [0, 1, 5, 13, 19, 20])
def test_taken_up_again_gives_the_same_bytes(tmp_path, straight, killed_after):
    path = tmp_path / "again"
    first = writer(path)
    for number in range(killed_after):
        add(first, number)
    first.close()
    second = writer(path)
    assert killed_after - 3 <= second.documents <= killed_after
    for number in range(second.documents, 20):
        add(second, number)
    second.finish(made_by={"by": "hand"}, licence_texts={"MIT": "text"})
    assert contents(path) == straight


def test_killed_while_finishing(tmp_path, straight, monkeypatch):
    path = tmp_path / "again"
    first = writer(path)
    for number in range(20):
        add(first, number)
    monkeypatch.setattr(ShardWriter, "_number_table", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        first.finish(made_by={})
    monkeypatch.undo()
    assert not (path / "manifest.json").exists()
    second = writer(path)
    assert second.documents == 20
    second.finish(made_by={"by": "hand"}, licence_texts={"MIT": "text"})
    assert contents(path) == straight


def test_killed_between_manifest_and_clearing_up(tmp_path, straight):
    path = tmp_path / "again"
    path.mkdir()
    for name, content in straight.items():
        (path / name).write_bytes(content)
    (path / "00003.table.npy").write_bytes(b"left over")
    (path / "00003.shard.json").write_bytes(b"{}")
    assert is_finished(path)
    assert contents(path) == straight


def test_licences_are_counted(straight):
    licences = json.loads(straight["manifest.json"])["licences"]
    assert licences["MIT"]["documents"] == 16 and licences["MIT"]["text"] == "text"


def test_names_are_numbered_by_name_not_by_order(tmp_path):
    for name, order in (("one", ["b", "a", "c"]), ("two", ["c", "b", "a"])):
        into = writer(tmp_path / name, shard_tokens=1)
        for source in order:
            into.add(np.array([1]), text_bytes=1, source=source, language="en", id_hash=1)
        into.finish(made_by={})
        data = open_dataset(tmp_path / name)
        assert [data.sources[index] for index in data.docs["source"]] == order
        assert data.sources == ["a", "b", "c"]


def test_other_files_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "00000.bin.tmp").write_text("torn")
    writer(tmp_path)
    assert contents(tmp_path) == {"notes.txt": b"mine"}


def test_a_finished_dataset_is_not_written_over(tmp_path, straight):
    shutil.copytree(tmp_path / "straight", tmp_path / "copy")
    with pytest.raises(ValueError, match="copy already holds a finished dataset"):
        writer(tmp_path / "copy")


@pytest.mark.parametrize(("settings", "message"), [({"eod": 300}, "eod=300"), ({"shard_tokens": 0}, "shard_tokens=0")])
def test_settings_out_of_range(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        writer(tmp_path / "data", **settings)


def test_nothing_to_write(tmp_path):
    with pytest.raises(ValueError, match="no document to write"):
        writer(tmp_path / "data").finish(made_by={})


def test_a_document_too_large_for_the_table(tmp_path):
    with pytest.raises(ValueError, match="4294967296 bytes does not fit"):
        writer(tmp_path / "data").add(np.array([1]), text_bytes=1 << 32, source="a", language="en", id_hash=0)
