"""What the options of `prepare` changed and left out, counted for `prepare.json`."""

from typing import Any

import numpy as np

from dwslm.data.encode import OVERLAP, SHORT, Reply
from dwslm.data.prepare_settings import SPLITS

REASONS = ("short", "duplicate", "duplicate_of_held_out", "overlap")
SHARES = ("any", "0.1", "0.5", "0.9")
"""Shares of a document's runs of 13 words that are held out: from which on it is counted."""
_EXAMPLES = 20


class Report:
    """Counts of one call. Sections of options that are off are not there.

    Attributes:
        content: as in `prepare.json`: `left_out` (by reason and split: documents, bytes), `control_characters`
            (documents, characters), `overlap` (held-out runs; training documents and bytes by share; documents
            by source; the first 20 ids).
    """

    def __init__(self, *, left_out: list[str], control: bool, held_out_runs: int | None):
        self.content: dict[str, Any] = {}
        if left_out:
            zero = {"documents": 0, "bytes": 0}
            self.content["left_out"] = {reason: {split: dict(zero) for split in SPLITS} for reason in left_out}
        if control:
            self.content["control_characters"] = {"documents": 0, "characters": 0}
        if held_out_runs is not None:
            self.content["overlap"] = {
                "held_out_runs": held_out_runs,
                "documents": dict.fromkeys(SHARES, 0),
                "bytes": dict.fromkeys(SHARES, 0),
                "sources": {},
                "examples": [],
            }

    def leave_out(self, reason: str, rows: np.ndarray) -> None:
        """Count rows that are left out for a reason."""
        for number, split in enumerate(SPLITS):
            mine = rows[rows["split"] == number]
            if len(mine):
                counts = self.content["left_out"][reason][split]
                counts["documents"] += len(mine)
                counts["bytes"] += int(mine["bytes"].sum())

    def add(self, reply: Reply) -> None:
        """Count what a chunk says of itself."""
        rows = reply.rows
        for why, reason in ((SHORT, "short"), (OVERLAP, "overlap")):
            self.leave_out(reason, rows[rows["why"] == why])
        if "control_characters" in self.content:
            self.content["control_characters"]["documents"] += int((rows["controls"] > 0).sum())
            self.content["control_characters"]["characters"] += int(rows["controls"].sum(dtype=np.int64))
        if "overlap" in self.content:
            self._add_overlap(self.content["overlap"], reply)

    def _add_overlap(self, overlap: dict[str, Any], reply: Reply) -> None:
        found = reply.rows[reply.rows["held_out"] > 0]
        share = found["held_out"] / np.maximum(found["runs"], 1)
        for name in SHARES:
            mine = found if name == "any" else found[share >= float(name)]
            overlap["documents"][name] += len(mine)
            overlap["bytes"][name] += int(mine["bytes"].sum())
        for number, count in zip(*np.unique(found["source"], return_counts=True), strict=True):
            name = reply.head["names"][0][number]
            overlap["sources"][name] = overlap["sources"].get(name, 0) + int(count)
        for row, document in reply.head["overlapping"][: _EXAMPLES - len(overlap["examples"])]:
            runs = {name: int(reply.rows[name][row]) for name in ("held_out", "runs")}
            overlap["examples"].append({"id": document, **runs})

    def done(self) -> dict[str, Any]:
        """The content, in one order whatever was met first."""
        if "overlap" in self.content:
            self.content["overlap"]["sources"] = dict(sorted(self.content["overlap"]["sources"].items()))
        return self.content


def joined(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """The report of the whole from those of its pieces, in their order."""
    whole: dict[str, Any] = _add(reports)
    if "overlap" in whole:
        whole["overlap"]["held_out_runs"] = reports[0]["overlap"]["held_out_runs"]  # each piece counts all of them
        whole["overlap"]["examples"] = whole["overlap"]["examples"][:_EXAMPLES]
        whole["overlap"]["sources"] = dict(sorted(whole["overlap"]["sources"].items()))
    return whole


def _add(values: list[Any]) -> Any:
    """Sum numbers, join lists, and both inside dictionaries."""
    if isinstance(values[0], dict):
        keys = list(dict.fromkeys(key for value in values for key in value))
        return {key: _add([value[key] for value in values if key in value]) for key in keys}
    return sum(values, [] if isinstance(values[0], list) else 0)
