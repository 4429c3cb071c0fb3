"""Pieces prepared apart and joined: the same bytes as one straight run."""

import json
import shutil

import pytest

import dwslm.data.lines
import dwslm.data.merge
from dwslm.data.merge import merge
from dwslm.data.prepare import prepare, prepare_tokenizer
from dwslm.data.readers import FieldSettings
from dwslm.data.shard_writer import ShardWriter
from tests.data.prepare_case import contents, neighbours, records, settings, write_jsonl

OPTIONS = {"dedup": True, "min_characters": 20, "strip_control": True, "decontaminate": "remove"}


class Case:
    """Five training files and a held-out one, with duplicates within and across files."""

    def __init__(self, folder, **options):
        self.folder = folder
        rows = records(500)
        for number, of in ((50, 3), (230, 225), (231, 225), (350, 10), (499, 1)):
            rows[number]["text"] = rows[of]["text"]
        held_out = records(40, "v")
        rows[420]["text"] = max(held_out, key=lambda row: len(row["text"]))["text"]
        self.train = [write_jsonl(folder / f"{i}.jsonl.gz", rows[i * 100 : (i + 1) * 100]) for i in range(5)]
        self.valid = write_jsonl(folder / "valid.jsonl", held_out)
        self.options = {"fields": FieldSettings(licence_field="license"), "workers": 1, **options}
        (folder / "MIT.txt").write_text("Permission is hereby granted")
        self.options["licence_files"] = {"MIT": str(folder / "MIT.txt")}
        prepare_tokenizer(self.settings("tokenizer.json"))
        self.options |= {"tokenizer": str(folder / "tokenizer.json"), "vocab_size": None}

    def settings(self, name, **changes):
        return settings(self.folder / name, ("", self.valid), **{**self.options, "train": self.train, **changes})

    def pieces(self, count, **changes):
        names = [f"piece{number}of{count}" for number in range(1, count + 1)]
        for number, name in enumerate(names, start=1):
            prepare(self.settings(name, piece=f"{number}/{count}", **changes))
        return [str(self.folder / name) for name in names]


@pytest.fixture
def case(tmp_path, monkeypatch):
    monkeypatch.setattr(dwslm.data.lines, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(dwslm.data.merge, "_COPY_TOKENS", 400)  # several copies a shard
    return Case(tmp_path)


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "options"])
@pytest.mark.parametrize("count", [1, 3, 6])
def test_merged_pieces_are_the_straight_run(case, count, options):
    straight = prepare(case.settings("straight", **options))
    merged = merge(str(case.folder / "merged"), case.pieces(count, **options)[::-1])
    assert contents(case.folder / "merged") == contents(case.folder / "straight")
    assert {**merged, "out": straight["out"]} == straight
    if options:
        assert merged["report"]["left_out"]["duplicate"]["train"]["documents"] == 5
    assert merge(str(case.folder / "merged"), case.pieces(count, **options))["already_complete"]


def test_pieces_with_workers_and_a_held_out_fraction(case):
    changes = {"valid": [], "valid_fraction": 0.3, "workers": 2, **OPTIONS}
    prepare(case.settings("straight", **changes))
    merge(str(case.folder / "merged"), case.pieces(3, **changes))
    assert contents(case.folder / "merged") == contents(case.folder / "straight")


def test_interrupted_and_repeated(case, monkeypatch):
    prepare(case.settings("straight", **OPTIONS))
    pieces = case.pieces(3, **OPTIONS)
    add, calls = ShardWriter.add_many, []

    def fail_later(self, *given, **more):
        calls.append(1)
        if len(calls) == 20:
            raise KeyboardInterrupt
        return add(self, *given, **more)

    monkeypatch.setattr(ShardWriter, "add_many", fail_later)
    with pytest.raises(KeyboardInterrupt):
        merge(str(case.folder / "merged"), pieces)
    assert len(list((case.folder / "merged.partial" / "train").glob("*.shard.json"))) > 2
    merge(str(case.folder / "merged"), pieces)
    assert contents(case.folder / "merged") == contents(case.folder / "straight")
    assert neighbours(case.folder / "merged") == ["merged"]


def test_pieces_that_do_not_belong_together(case, tmp_path):
    pieces = case.pieces(3)
    out = str(tmp_path / "merged")
    with pytest.raises(ValueError, match=r"piece 2/3 is missing \(1 of 3 are\)"):
        merge(out, [pieces[0], pieces[2]])
    with pytest.raises(ValueError, match="piece 1/3 is given twice"):
        merge(out, [*pieces, pieces[0]])
    with pytest.raises(ValueError, match="is one of 3 pieces and .* one of 2"):
        merge(out, [case.pieces(2)[0], pieces[2]])
    prepare(case.settings("other", piece="2/3", min_characters=5))
    with pytest.raises(ValueError, match=r"not pieces of one dataset \(settings\.min_characters"):
        merge(out, [pieces[0], str(tmp_path / "other"), pieces[2]])
    prepare(case.settings("whole"))
    with pytest.raises(ValueError, match="whole is a whole dataset, not a piece"):
        merge(out, [str(tmp_path / "whole"), pieces[1]])
    with pytest.raises(FileNotFoundError, match="no finished piece"):
        merge(out, [str(tmp_path / "nowhere")])
    assert not (tmp_path / "merged").exists()


def test_damaged_pieces(case, tmp_path):
    pieces = case.pieces(3)
    for name, damage, message in (
        ("train/00000.bin", lambda raw: bytes([raw[0] ^ 1]) + raw[1:], r"00000\.bin is altered: its sha256"),
        ("train/00001.merge.npy", lambda raw: raw[:-12], r"00001\.merge\.npy is damaged"),
        ("train/00001.merge.npy", None, r"00001\.merge\.npy is missing"),
        ("tokenizer.json", lambda raw: raw + b"\n", "not the tokenizer that the piece was made with"),
    ):
        path = tmp_path / "piece1of3" / name
        raw = path.read_bytes()
        path.unlink()
        if damage is not None:
            path.write_bytes(damage(raw))
        with pytest.raises(ValueError, match=message):
            merge(str(tmp_path / "merged"), pieces)
        path.write_bytes(raw)
    merge(str(tmp_path / "merged"), pieces)


def test_an_id_in_two_pieces(case, tmp_path):
    rows = records(100, "u")
    rows[7]["id"] = "t11"
    case.train[4] = write_jsonl(tmp_path / "4.jsonl.gz", rows)
    pieces = case.pieces(3)
    with pytest.raises(ValueError, match=r"1 documents have an id .* document 11 of .*piece1of3/train/0000\d and"):
        merge(str(tmp_path / "merged"), pieces)


def test_something_else_is_never_replaced(case, tmp_path):
    pieces = case.pieces(2)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match="mine is there and was not made by prepare"):
        merge(str(tmp_path / "mine"), pieces, overwrite=True)
    prepare(case.settings("other", min_characters=5))
    with pytest.raises(ValueError, match="holds a dataset made otherwise"):
        merge(str(tmp_path / "other"), pieces)
    merge(str(tmp_path / "other"), pieces, overwrite=True)
    prepare(case.settings("straight"))
    assert contents(tmp_path / "other") == contents(tmp_path / "straight")


def test_pieces_are_runs_of_files_of_like_size(tmp_path):
    sizes = [10, 10, 10, 70, 10, 10, 60, 20]
    files = []
    for number, size in enumerate(sizes):
        files.append(str(tmp_path / f"{number}.txt"))
        (tmp_path / f"{number}.txt").write_bytes(b"x" * size)
    shutil.copy(tmp_path / "0.txt", tmp_path / "valid.txt")
    given = {"fields": FieldSettings(source="s", language="l"), "tokenizer": "t", "vocab_size": None}

    def pieces(count):
        cut = []
        for number in range(1, count + 1):
            made = settings("x", ("", str(tmp_path / "valid.txt")), train=files, piece=f"{number}/{count}", **given)
            parts = made.parts(made.inputs())
            cut.append([part.file.stem for split in parts.values() for part in split])
        return cut

    assert pieces(2) == [["0", "1", "2", "3", "4"], ["5", "6", "7", "valid"]]
    assert pieces(3) == [["0", "1", "2", "3"], ["4", "5", "6"], ["7", "valid"]]
    assert pieces(9) == [[str(number)] for number in range(8)] + [["valid"]]
    for count in range(1, 10):
        assert sum(pieces(count), []) == [*map(str, range(8)), "valid"] and all(pieces(count))
    with pytest.raises(ValueError, match="there are only 9 files; ask for fewer pieces"):
        pieces(10)


def test_a_piece_says_which_splits_it_has(case):
    case.pieces(6)
    made = [json.loads((case.folder / f"piece{n}of6" / "prepare.json").read_bytes())["splits"] for n in range(1, 7)]
    assert made == [["train"]] * 5 + [["valid"]]
    assert prepare(case.settings("piece6of6", piece="6/6"))["already_complete"]
