"""What `prepare` is asked to do, and the record of it by which a later call knows its work again."""

import hashlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from dwslm.data.readers import FORMATS, DatasetSource, FieldSettings, Input, list_files, relative_name
from dwslm.data.tokenizer import EOD, eod_id, load_tokenizer, tokenizer_hash

SPLITS = ("train", "valid")
_EDGE = 1 << 20


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
    """Split of `dataset` to hold out. Empty: none."""
    valid_fraction: float = 0.0
    """Share of the training text's groups to hold out, by a hash of the group. 0: held-out text is given."""
    fields: FieldSettings = field(default_factory=FieldSettings)
    """Where text, id, source, language, group and licence of a document come from."""
    tokenizer: str = ""
    """A tokenizer file to use. Empty: one is trained on the training text."""
    vocab_size: int | None = None
    """Entries of the vocabulary, special token included. None: 32,768, or what the given tokenizer has."""
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
    overwrite: bool = False
    """Replace a dataset made with other settings, which stays in place until the new one is whole; and begin
    anew where unfinished work has other settings."""

    def __post_init__(self) -> None:
        if not self.out:
            raise ValueError("out is empty: name the folder to make")
        if not self.train and not self.dataset:
            raise ValueError("no training text: give train or dataset")
        if self.dataset_valid_split and not self.dataset:
            raise ValueError(f"dataset_valid_split={self.dataset_valid_split!r} is given without dataset")
        if self.format not in FORMATS:
            raise ValueError(f"format={self.format!r}: must be one of {', '.join(FORMATS)}")
        if not 0.0 <= self.valid_fraction < 1.0:
            raise ValueError(f"valid_fraction={self.valid_fraction}: must be in [0, 1)")
        if bool(self.valid or self.dataset_valid_split) == bool(self.valid_fraction):
            raise ValueError("held-out text: give either valid (or dataset_valid_split) or valid_fraction")
        if not self.tokenizer and self.eod_token != EOD:
            raise ValueError(f"eod_token={self.eod_token!r}: only a given tokenizer can have another than {EOD}")
        for name in ("tokenizer_bytes", "shard_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.skip_bad < 0:
            raise ValueError(f"skip_bad={self.skip_bad}: must be 0 or more")

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
                "leave vocab_size out"
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
        },
        "inputs": {
            split: [_describe_input(item, settings.format) for item in items] for split, items in inputs.items()
        },
        "versions": {"tokenizers": tokenizers.__version__},
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
