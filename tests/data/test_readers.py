import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from dwslm.data.chunks import read_documents
from dwslm.data.readers import BadDocument, DatasetSource, Document, FieldSettings, accept, list_files

FIELDS = FieldSettings()
RECORDS = [
    {"id": "a", "text": "first text\nin two lines", "source": "web", "language": "en"},
    {"id": 7, "text": "zweiter Text: ß, 日本", "source": "books", "language": "de"},
    {"id": "c", "text": " third ", "source": "web", "language": "en"},
]


def line(**changes):
    return json.dumps({**RECORDS[0], **changes}).encode() + b"\n"


def lines(records=RECORDS):
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


def read(path, fields=FIELDS, form="auto"):
    return list(read_documents([path], fields, form))


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def compress(name, content):
    if name.endswith(".gz"):
        return gzip.compress(content)
    return zstandard.compress(content) if name.endswith(".zst") else content


# --------------------------------------------------------------------------------------- what is read


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_json_lines(tmp_path, name):
    path = write(tmp_path / name, compress(name, lines()))
    documents = read(path)
    assert [d.id for d in documents] == ["a", "7", "c"]
    assert [d.text for d in documents] == [record["text"] for record in RECORDS]
    assert [d.place for d in documents] == [f"{path}:1", f"{path}:2", f"{path}:3"]
    assert [d.group for d in documents] == ["a", "7", "c"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_several_compressed_members_are_one_file(tmp_path, name):
    parts = [lines(RECORDS[:1]), lines(RECORDS[1:])]
    path = write(tmp_path / name, b"".join(compress(name, part) for part in parts))
    assert len(read(path)) == 3


def test_zstandard_with_a_window_beyond_the_default(tmp_path):
    parameters = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=False, compression_level=1)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path = write(tmp_path / "a.jsonl.zst", compressor.compress(lines()) + compressor.flush())
    with pytest.raises(zstandard.ZstdError):  # so the file does need more than 128 MiB
        zstandard.ZstdDecompressor().stream_reader(path.open("rb")).read()
    assert len(read(path)) == 3


def test_windows_line_ends_blank_lines_and_no_last_line_end(tmp_path):
    path = write(tmp_path / "a.jsonl", lines().replace(b"\n", b"\r\n\r\n").rstrip())
    assert [d.place for d in read(path)] == [f"{path}:1", f"{path}:3", f"{path}:5"]


def test_parquet(tmp_path):
    records = [{**record, "id": str(record["id"]), "unused": number} for number, record in enumerate(RECORDS)]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet", row_group_size=2)
    documents = read(tmp_path / "a.parquet")
    assert [(d.id, d.text, d.source, d.language) for d in documents] == [
        (r["id"], r["text"], r["source"], r["language"]) for r in records
    ]
    assert documents[2].place == f"{tmp_path / 'a.parquet'}:row 3"


def test_folder_of_text(tmp_path):
    write(tmp_path / "b" / "two.md", b"zwei\r\n")
    write(tmp_path / "a" / "one.txt", b"one")
    write(tmp_path / ".git" / "config", b"hidden")
    documents = read(tmp_path, FieldSettings(source="notes", language="en", licence="MIT"))
    assert [(d.id, d.text) for d in documents] == [("a/one.txt", "one"), ("b/two.md", "zwei\r\n")]
    assert {(d.source, d.language, d.licence) for d in documents} == {("notes", "en", "MIT")}


def test_folder_of_shards_in_the_order_of_their_paths(tmp_path):
    write(tmp_path / "b.jsonl", lines(RECORDS[:1]))
    write(tmp_path / "a" / "z.jsonl.gz", gzip.compress(lines(RECORDS[1:])))
    assert [d.id for d in read(tmp_path)] == ["7", "c", "a"]


def test_datasets_library_local_folder(tmp_path):
    datasets = pytest.importorskip("datasets")
    write(tmp_path / "files" / "train.jsonl", lines([{**record, "id": str(record["id"])} for record in RECORDS]))
    documents = list(read_documents([DatasetSource(str(tmp_path / "files"))], FIELDS))
    assert [d.id for d in documents] == ["a", "7", "c"]
    assert documents[1].place == f"{tmp_path / 'files'}[train]:row 2"
    saved = datasets.Dataset.from_list([{"text": "saved", "id": "s"}])
    saved.save_to_disk(str(tmp_path / "saved"))
    fields = FieldSettings(source="disk", language="en")
    assert [d.text for d in read_documents([DatasetSource(str(tmp_path / "saved"))], fields)] == ["saved"]


def test_fields_by_other_names_and_fixed_values(tmp_path):
    record = {"body": "text", "url": "u1", "lang": "fr", "page": 12, "terms": "MIT", "source": "ignored"}
    path = write(tmp_path / "a.jsonl", lines([record]))
    fields = FieldSettings(
        text_field="body",
        id_field="url",
        language_field="lang",
        group_field="page",
        licence_field="terms",
        source="crawl",
    )
    assert read(path, fields) == [Document("u1", "text", "crawl", "fr", "12", "MIT", f"{path}:1")]


def test_no_id_field_makes_ids_that_do_not_depend_on_the_place(tmp_path):
    fields = FieldSettings(id_field="")
    ids = []
    for folder in ("here", "there"):
        path = write(tmp_path / folder / "a.jsonl", lines())
        ids.append([d.id for d in read(path, fields)])
    assert ids[0] == ids[1] == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3"]


# --------------------------------------------------------------------------------------- what is bad


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b'{"id": "x", "text": \n', "malformed JSON: Expecting value"),
        (b"[1, 2]\n", "not an object with fields but a list"),
        (b"[" * 100_000 + b"\n", "recursion"),
        (line(text="")[:-1] + b"\n", "empty document"),
        (line(text=" \n\t"), "empty document"),
        (line(text=5), "field 'text' is not text but a int"),
        (line(text=None), "no field 'text' (name another with --text-field NAME)"),
        (
            line(id=None),
            "no field 'id' (name another with --id-field NAME, or take file name and line as ids with --id-field \"\")",
        ),
        (
            line(source=None),
            "no field 'source' (name another with --source-field NAME, or give all documents one with --source NAME)",
        ),
        (line(id=""), "empty id"),
        (line(id=True), "field 'id' is not text but a bool"),
        (
            b'{"id": "x", "text": "\xff", "source": "s", "language": "l"}\n',
            "not valid UTF-8: byte 0xFF at offset 21",
        ),
        (
            rb'{"id": "x", "text": "ab\ud800", "source": "s", "language": "l"}' + b"\n",
            "lone surrogate U+D800",
        ),
    ],
)
def test_a_bad_line_is_named_and_passed_over(tmp_path, name, bad, reason):
    path = write(tmp_path / name, compress(name, line(id="1") + line(id="2") + bad + line(id="4")))
    first, second, third, fourth = read(path)
    assert [first.id, second.id, fourth.id] == ["1", "2", "4"]
    assert isinstance(third, BadDocument) and third.place == f"{path}:3" and reason in third.reason


def test_accept_stops_at_the_first_or_beyond_the_number_allowed():
    good = Document("a", "text", "s", "l", "a", "", "f:1")
    items = [good, BadDocument("f:2", "empty document"), good, BadDocument("f:4", "empty text"), good]
    with pytest.raises(ValueError, match=r"^f:2: empty document; mend it"):
        list(accept(items, 0, []))
    bad = []
    with pytest.raises(ValueError, match=r"f:4: empty text \(and 1 bad documents before it\)"):
        list(accept(items, 1, bad))
    bad = []
    assert list(accept(items, 2, bad)) == [good] * 3
    assert [item.place for item in bad] == ["f:2", "f:4"]


def test_bad_utf8_in_parquet_and_text(tmp_path):
    column = pa.array([b"good", b"b\xc3d", b"fine"], pa.binary()).cast(pa.string(), safe=False)
    table = pa.table({"text": column, "id": ["1", "2", "3"]})
    try:
        pq.write_table(table, tmp_path / "a.parquet")
    except pa.ArrowInvalid:
        pytest.skip("this pyarrow does not write bad UTF-8")
    items = read(tmp_path / "a.parquet", FieldSettings(source="s", language="l"))
    assert [isinstance(item, BadDocument) for item in items] == [False, True, False]
    assert str(items[1]) == f"{tmp_path / 'a.parquet'}:row 2: not valid UTF-8: byte 0xC3 at offset 1"
    write(tmp_path / "text" / "latin.txt", "Größe".encode("latin-1"))
    (item,) = read(tmp_path / "text", FieldSettings(source="s", language="l"))
    assert str(item) == f"{tmp_path / 'text' / 'latin.txt'}: not valid UTF-8: byte 0xF6 at offset 2"


# ----------------------------------------------------------------------------------- what stops it all


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_compressed_file_cut_short(tmp_path, name):
    content = b"".join(line(id=str(number), text=f"{number * 7919} text") for number in range(3000))
    whole = compress(name, content)
    path = write(tmp_path / name, whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=rf"{name}:\d+: the compressed file is damaged or cut short"):
        read(path)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_compressed_file_with_damage_in_the_middle(tmp_path, name):
    content = b"".join(line(id=str(number), text=f"{number * 7919} text") for number in range(3000))
    whole = bytearray(compress(name, content))
    middle = len(whole) // 2
    whole[middle : middle + 64] = bytes(64)
    path = write(tmp_path / name, whole)
    with pytest.raises(ValueError, match=rf"{name}:\d+: the compressed file is damaged or cut short"):
        list(accept(read_documents([path], FIELDS), 10**9, []))


def test_parquet_cut_short(tmp_path):
    pq.write_table(pa.Table.from_pylist([{"id": "a", "text": "b"}]), tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    write(tmp_path / "a.parquet", whole[:-20])
    with pytest.raises(ValueError, match=r"a\.parquet: not a whole Parquet file"):
        read(tmp_path / "a.parquet")


def test_inputs_that_are_not_there_or_not_clear(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone\.jsonl: no such file or folder"):
        read(tmp_path / "gone.jsonl")
    with pytest.raises(FileNotFoundError, match="empty holds no files to read"):
        (tmp_path / "empty").mkdir()
        read(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"a\.csv: cannot tell from its name"):
        read(write(tmp_path / "a.csv", b"a,b"))
    with pytest.raises(ValueError, match="format='xml'"):
        list_files(tmp_path, "xml")
    write(tmp_path / "mixed" / "a.jsonl", lines())
    write(tmp_path / "mixed" / "README.txt", b"about")
    with pytest.raises(ValueError, match=r"mixed holds both a\.jsonl and README\.txt: give --format"):
        read(tmp_path / "mixed")
    assert len(read(tmp_path / "mixed", form="jsonl")) == 3


def test_plain_text_needs_a_source_and_a_language(tmp_path):
    path = write(tmp_path / "a.txt", b"text")
    with pytest.raises(ValueError, match=r"a\.txt: plain text has no fields; say its language with --language NAME"):
        read(path, FieldSettings(source="s"))


def test_dataset_that_is_not_there(tmp_path):
    pytest.importorskip("datasets")
    with pytest.raises(ValueError, match=r"gone\[train\]: cannot read past row 0"):
        list(read_documents([DatasetSource(str(tmp_path / "gone"))], FIELDS))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"text_field": ""}, "--text-field is empty"),
        ({"language_field": ""}, "neither --language nor --language-field"),
    ],
)
def test_field_settings_that_lead_nowhere(settings, message):
    with pytest.raises(ValueError, match=message):
        FieldSettings(**settings)
