"""A pass over the held-out text before any training text is looked at: what training text is compared with."""

from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dwslm.data.chunks import Part, parse, read_chunks
from dwslm.data.decontaminate import RunCollector, write_runs
from dwslm.data.dedup import MAX_KEYS, text_hash
from dwslm.data.encode import clean, is_held_out
from dwslm.data.prepare_settings import SPLITS, PrepareSettings
from dwslm.data.readers import Document


def survey(
    settings: PrepareSettings,
    parts: dict[str, list[Part]],
    folder: Path,
    progress: Callable[[int, int, float | None], None],
) -> tuple[np.ndarray, int]:
    """Gather what `dedup` and `decontaminate` compare training text with.

    Documents that cannot be used are passed over here; the main pass says what is wrong with them.

    Args:
        parts: the whole input by split; training text is read only if a fraction of it is held out.
        folder: the runs of 13 words are written here, for `HeldOutRuns`.
        progress: called with documents and bytes read, and the share of the input.

    Returns:
        sorted hashes of the held-out texts, [n] uint64; how many different runs they have. Empty and 0 for what
        was not asked.
    """
    texts = array("Q")
    runs = RunCollector()
    splits = SPLITS if settings.valid_fraction else ("valid",)
    total = sum(part.size for split in splits for part in parts[split])
    before = documents = size = 0
    for split in splits:
        for chunk in read_chunks(parts[split], settings.fields):
            for item in parse(chunk, settings.fields):
                if not isinstance(item, Document):
                    continue
                documents += 1
                size += len(item.text.encode("utf-8"))
                if split == "valid" or is_held_out(item, settings.valid_fraction):
                    text, _ = clean(item.text, settings.strip_control)
                    if settings.dedup:
                        texts.append(text_hash(text))
                    if settings.decontaminate != "off":
                        runs.add(text)
            if len(texts) > MAX_KEYS // 4:
                raise ValueError(f"dedup: more than {MAX_KEYS // 4:,} held-out documents; hold out fewer")
            progress(documents, size, (before + chunk.offset) / total if total else None)
        before += sum(part.size for part in parts[split])
    count = write_runs(folder, [runs.runs()]) if settings.decontaminate != "off" else 0
    return np.unique(np.array(texts, np.uint64)), count
