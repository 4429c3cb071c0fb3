"""From benchmark JSON to report.md and report.html."""

import os
from collections.abc import Sequence
from pathlib import Path

from dwslm.page import (
    bench_arms,
    bench_claims,
    bench_dense,
    bench_layers,
    bench_proof,
    bench_setup,
    bench_stability,
    html,
    markdown,
)
from dwslm.page.bench_file import Bench, join
from dwslm.page.document import Page, Prose, Section


def build(bench: Bench) -> Page:
    """The page of a benchmark; a section whose part was not measured is left out."""
    sections: list[Section | None] = [
        bench_setup.picks(bench),
        bench_claims.section(bench),
        bench_setup.setup(bench),
        bench_setup.ceilings(bench),
        bench_arms.section(bench),
        bench_layers.attention(bench),
        bench_layers.delta(bench),
        bench_dense.mlp(bench),
        bench_dense.head(bench),
        bench_dense.small(bench),
        bench_proof.floor(bench),
        bench_proof.recording(bench),
        bench_proof.gate(bench),
        bench_stability.section(bench),
        bench_setup.noise(bench),
        bench_setup.missing(bench),
    ]
    notes = [*bench.notes, *(str(note) for piece in bench.pieces for note in piece.raw["notes"] or [])]
    return Page(
        title=f"Day 0: kernels on {bench.device}",
        source=bench.source,
        lead=tuple(Prose(note, warning=True) for note in dict.fromkeys(notes)),
        sections=tuple(section for section in sections if section is not None),
    )


def write(files: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Joins the files and writes `report.md` and `report.html` into the folder `out`, which is made where it is missing.

    Returns the two paths. Raises OSError and what `bench_file.join` raises; nothing is written unless all files can be joined.
    """
    page = build(join(files))
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    paths = (folder / "report.md", folder / "report.html")
    for path, text in zip(paths, (markdown.render(page), html.render(page)), strict=True):
        path.write_text(text, encoding="utf-8")
    return paths
