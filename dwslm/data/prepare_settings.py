"""What `prepare` is asked to do, and the record of it by which a later call knows its work again."""

import hashlib
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from dwslm.data.chunks import Part, list_parts
from dwslm.data.readers import FORMATS, DatasetSource, FieldSettings, Input, list_files, relative_name
from dwslm.data.tokenizer import EOD, check_vocab_size, eod_id, load_tokenizer, tokenizer_hash

SPLITS = ("train", "valid")
DECONTAMINATE = ("off", "report", "remove")
_EDGE = 1 << 20


SAMPLE_DATA = "data/sample"
"""Where the sample that ships with the code goes."""

DEMO_DATA = "data/demo"
"""Where `dwslm demo` prepares it, with a smaller vocabulary."""


@dataclass
class PrepareSettings:
    """What to read, how to tokenize it and where to put it."""

    out: str
    """Folder to make: tokenizer.json, train/, valid/ and prepare.json."""
    train: list[str] = field(default_factory=list)
    """Training text: files (.jsonl, .jsonl.gz, .jsonl.zst, .parquet, .txt) or folders."""
    valid: list[str] = field(default_factory=list)
    """Held-out text, in the same forms."""
    format: str = "auto"
    """How to read `train` and `valid`: "auto" by name, or "jsonl", "parquet", "text" for all of them."""
    dataset: str = ""
    """More training text, through the `datasets` library: a name on the hub or a local folder."""
    dataset_config: str = ""
    """Configuration of `dataset`, where it has several."""
    dataset_split: str = "train"
    """Split of `dataset` to train on."""
    dataset_valid_split: str = ""
    """Split of `dataset` to hold out. Unless given, none is."""
    valid_fraction: float = 0.0
    """Share of the training text's groups to hold out, by a hash of the group, instead of held-out text that is given."""
    fields: FieldSettings = field(default_factory=FieldSettings)
    """Where text, id, source, language, group and licence of a document come from."""
    tokenizer: str = ""
    """A tokenizer file to use. Unless given, one is trained on the training text."""
    vocab_size: int | None = None
    """Entries of the vocabulary, special token included. Unless given, 32,768, or what the given tokenizer has."""
    tokenizer_bytes: int = 200_000_000
    """Train the tokenizer on at most this many bytes of text: documents chosen by a hash of their ids."""
    eod_token: str = EOD
    """The end-of-document token, where a given tokenizer spells it differently."""
    shard_tokens: int = 1 << 27
    """Tokens per shard: a shard is closed by the document that reaches it."""
    skip_bad: int = 0
    """How many documents that cannot be used to leave out and list; one more stops the work."""
    licence_files: dict[str, str] = field(default_factory=dict)
    """Name of a licence to the file with its text, which goes into the manifest."""
    workers: int | None = None
    """Processes that tokenize. Unless given, as many as there are CPU cores. The result is the same for any number."""
    piece: str = ""
    """Prepare part i of n, given as "i/n", for `dwslm prepare merge` to join. Needs `tokenizer`: all parts share one."""
    min_characters: int = 0
    """Leave out documents of fewer characters, training and held-out, and count them in the report."""
    strip_control: bool = False
    """Take control characters (but tab, line feed, carriage return) and byte order marks out of texts, and count them."""
    dedup: bool = False
    """Leave out documents whose text occurred before, and training documents whose text is held out; count them."""
    decontaminate: str = "off"
    """Look for runs of 13 words that training and held-out text share: "off", "report", or "remove", which leaves out
    training documents by `overlap_share`."""
    overlap_share: float = 0.5
    """Where `decontaminate=remove`: leave out documents with at least this share of their runs held out. 0: any."""
    overwrite: bool = False
    """Replace a dataset made with other settings, which stays in place until the new one is whole; and begin
    anew where unfinished work has other settings."""

    def __post_init__(self) -> None:
        if not self.out:
            raise ValueError("--out is empty: name the folder to make")
        if not self.train and not self.dataset:
            raise ValueError("no training text: give --train or --dataset")
        if self.dataset_valid_split and not self.dataset:
            raise ValueError(f"--dataset-valid-split {self.dataset_valid_split} is given without --dataset")
        if self.format not in FORMATS:
            raise ValueError(f"format={self.format!r}: must be one of {', '.join(FORMATS)}")
        if not 0.0 <= self.valid_fraction < 1.0:
            raise ValueError(f"valid_fraction={self.valid_fraction}: must be in [0, 1)")
        if bool(self.valid or self.dataset_valid_split) == bool(self.valid_fraction):
            raise ValueError("held-out text: give either --valid (or --dataset-valid-split) or --valid-fraction")
        if not self.tokenizer and self.eod_token != EOD:
            raise ValueError(f"eod_token={self.eod_token!r}: only a given tokenizer can have another than {EOD}")
        if self.vocab_size is not None and not self.tokenizer:
            check_vocab_size(self.vocab_size)
        for name in ("tokenizer_bytes", "shard_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        for name in ("skip_bad", "min_characters"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be 0 or more")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers={self.workers}: must be at least 1")
        if self.decontaminate not in DECONTAMINATE:
            raise ValueError(f"decontaminate={self.decontaminate!r}: must be one of {', '.join(DECONTAMINATE)}")
        if not 0.0 <= self.overlap_share <= 1.0:
            raise ValueError(f"overlap_share={self.overlap_share}: must be in [0, 1]")
        self.piece_of()

    def piece_of(self) -> tuple[int, int]:
        """Which piece of how many this is, counted from 1; (1, 1) for the whole."""
        if not self.piece:
            return 1, 1
        match = re.fullmatch(r"(\d+)/(\d+)", self.piece)
        if not match or not 1 <= int(match[1]) <= int(match[2]):
            raise ValueError(f"piece={self.piece!r}: must be i/n with i from 1 to n, as 3/8")
        if not self.tokenizer:
            raise ValueError(
                f"--piece {self.piece} without --tokenizer: all pieces need the same one; train it once with "
                "--tokenizer-only and give it to each"
            )
        return int(match[1]), int(match[2])

    def no_document(self, split: str) -> ValueError:
        """The error where nothing is left for a split."""
        way_out = "change valid_fraction" if self.valid_fraction else "give some"
        return ValueError(f"{self.out}: no document for the {split} split; {way_out}")

    def worker_count(self) -> int:
        """`workers`, or the CPU cores that this process may use."""
        if self.workers is not None:
            return self.workers
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def parts(self, inputs: dict[str, list[Input]]) -> dict[str, list[Part]]:
        """The files of this piece by split. Pieces are runs of whole files, of about the same size together.

        Raises:
            ValueError: more pieces than files.
        """
        both = [(split, part) for split in SPLITS for part in list_parts(inputs[split], self.format)]
        number, count = self.piece_of()
        if count > len(both):
            raise ValueError(
                f"piece={self.piece}: there are only {len(both)} files; ask for fewer pieces, or split files"
            )
        total = sum(part.size for _, part in both)
        cuts, done = [0], 0
        for index, (_, part) in enumerate(both):
            # A piece takes files until it has its share, but leaves one for each piece after it.
            enough = done >= total * len(cuts) / count and index > cuts[-1]
            if len(cuts) < count and (enough or len(both) - index == count - len(cuts)):
                cuts.append(index)
            done += part.size
        mine = both[cuts[number - 1] : [*cuts, len(both)][number]]
        return {split: [part for given, part in mine if given == split] for split in SPLITS}

    def inputs(self) -> dict[str, list[Input]]:
        """Inputs by the split that they were given for."""
        inputs: dict[str, list[Input]] = {
            "train": [*map(Path, self.train)],
            "valid": [*map(Path, self.valid)],
        }
        for split, name in zip(SPLITS, (self.dataset_split, self.dataset_valid_split), strict=True):
            if self.dataset and name:
                inputs[split].append(DatasetSource(self.dataset, self.dataset_config, name))
        return inputs


def describe(settings: PrepareSettings, inputs: dict[str, list[Input]]) -> dict[str, Any]:
    """Everything that decides the bytes of a dataset, without anything that does not.

    Paths are left out but for their last part, so that a text gives the same dataset wherever it lies.
    `skip_bad` is left out too: it does not change which documents are good, and raising it after an error
    must not throw the work away.
    """
    if settings.tokenizer:
        tokenizer = load_tokenizer(settings.tokenizer)
        eod_id(tokenizer, settings.eod_token)
        vocab_size = tokenizer.get_vocab_size()
        if settings.vocab_size not in (None, vocab_size):
            raise ValueError(
                f"vocab_size={settings.vocab_size}, but {settings.tokenizer} has {vocab_size} entries; "
                "leave --vocab-size out"
            )
        origin: dict[str, Any] = {"tokenizer": tokenizer_hash(settings.tokenizer)}
    else:
        vocab_size = 32768 if settings.vocab_size is None else settings.vocab_size
        origin = {"tokenizer_bytes": settings.tokenizer_bytes}
    licences = {}
    for name, file in sorted(settings.licence_files.items()):
        if not Path(file).is_file():
            raise FileNotFoundError(f"{file}: no such file (the text of licence {name!r})")
        licences[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    # Left out where they are off: a dataset made before there were such options is the same dataset.
    options: dict[str, Any] = {name: getattr(settings, name) for name in ("min_characters", "strip_control", "dedup")}
    options = {name: value for name, value in options.items() if value}
    if settings.decontaminate != "off":
        options["decontaminate"] = settings.decontaminate
    if settings.decontaminate == "remove":
        options["overlap_share"] = settings.overlap_share
    return {
        "settings": {
            "format": settings.format,
            "valid_fraction": settings.valid_fraction,
            "fields": asdict(settings.fields),
            "vocab_size": vocab_size,
            "eod_token": settings.eod_token,
            "shard_tokens": settings.shard_tokens,
            "licence_files": licences,
            **origin,
            **options,
        },
        "inputs": {
            split: [_describe_input(item, settings.format) for item in items] for split, items in inputs.items()
        },
        "versions": {"tokenizers": tokenizers.__version__},
        **({"piece": settings.piece} if settings.piece else {}),
    }


def _describe_input(item: Input, form: str) -> dict[str, Any]:
    """An input by names, sizes and a hash of the first and last MiB of each file: quick whatever the size."""
    if isinstance(item, DatasetSource):
        return {"dataset": item.name, "config": item.config, "split": item.split}
    digest = hashlib.sha256()
    total = 0
    files = list_files(item, form)
    for path, _ in files:
        size = path.stat().st_size
        total += size
        digest.update(f"{relative_name(path, item)}\0{size}\0".encode("utf-8", "surrogateescape"))
        with path.open("rb") as file:
            digest.update(file.read(_EDGE))
            file.seek(max(0, size - _EDGE))
            digest.update(file.read(_EDGE))
    return {"name": item.name, "files": len(files), "bytes": total, "edges_sha256": digest.hexdigest()}


def difference(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """The first settings in which two records differ, for a message; empty if none."""
    old, new = _flat(theirs), _flat(ours)
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return "; ".join(
        f"other {key}" if key.startswith("inputs.") else f"{key}: {old.get(key)} there, {new.get(key)} now"
        for key in keys[:2]
    )


def _flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in record.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat
