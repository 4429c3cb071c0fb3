"""The text that ships: what its README promises."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

SAMPLE = Path(__file__).parents[2] / "sample"
TERMS = {
    "public-domain",
    "public-domain text, MIT package",
    "Apache-2.0",
    "MIT or Apache-2.0",
    "BSD-3-Clause",
    "BSD-3-Clause or similar",
    "BSL-1.0",
    "MPL-2.0",
    "PSF-2.0",
    "PostgreSQL",
    "WordNet-3.0",
}


@pytest.fixture(scope="module")
def documents():
    read = {}
    for split in ("train", "valid"):
        with gzip.open(SAMPLE / f"{split}.jsonl.gz", "rt", encoding="utf-8") as file:
            read[split] = [json.loads(line) for line in file]
    return read


def test_terms_allow_shipping(documents):
    assert {document["license"] for split in documents.values() for document in split} <= TERMS


def test_each_package_is_named_with_its_terms(documents):
    packages = {document["id"].split("/")[1] for split in documents.values() for document in split}
    licences = (SAMPLE / "LICENSES.txt").read_text("utf-8").splitlines()
    named = {line.split()[1] for line in licences if len(line.split()) >= 4}
    assert packages <= named


def test_ids_are_unique_and_no_translation_crosses_the_split(documents):
    ids = Counter(document["id"] for split in documents.values() for document in split)
    assert max(ids.values()) == 1
    pages = {
        split: {
            (document["source"], document["id"].split("/", 3)[3])
            for document in chosen
            if document["source"] in ("office-help", "server-manuals")
        }
        for split, chosen in documents.items()
    }
    assert not pages["train"] & pages["valid"]


def test_readme_counts(documents):
    readme = (SAMPLE / "README.md").read_text("utf-8")
    for split, chosen in documents.items():
        text_bytes = sum(len(document["text"].encode("utf-8")) for document in chosen)
        assert f"| `{split}.jsonl.gz` | {len(chosen):,} | {text_bytes / 1e6:.2f} MB |" in readme
