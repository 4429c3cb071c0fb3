"""The table that answers each of the claims for this device."""

from dwslm.page.bench_file import Bench
from dwslm.page.claim_rules import DIFFERENT, NOT_MEASURED, SAME, Answer
from dwslm.page.claim_rules_dense import RULES
from dwslm.page.claims import CLAIMS, THEIR_DEVICE, Claim
from dwslm.page.document import Cell, Prose, Section, Table
from dwslm.page.words import listed

TITLE = "Earlier findings, answered for this device"


def answers(bench: Bench) -> list[tuple[Claim, Answer]]:
    """Every claim with what this benchmark says to it."""
    return [(claim, RULES[claim.rule](bench, claim.given)) for claim in CLAIMS]


def section(bench: Bench) -> Section:
    if bench.without_gpu:
        return Section(
            "claims",
            TITLE,
            (Prose("The earlier findings are about a GPU, and this was measured without one: none is answered."),),
        )
    found = answers(bench)
    rows = tuple(
        (
            Cell(claim.says, note=claim.name),
            Cell(claim.theirs),
            Cell(answer.ours),
            Cell(answer.verdict, strong=answer.verdict == SAME),
            Cell(answer.why, note=claim.test if claim.rule == "never" else f"same if {claim.test}"),
        )
        for claim, answer in found
    )
    by_verdict = {
        verdict: [claim.name for claim, answer in found if answer.verdict == verdict]
        for verdict in (SAME, DIFFERENT, NOT_MEASURED)
    }
    counts = listed(f"{len(names)} {verdict}" for verdict, names in by_verdict.items())
    verdicts = [f"Of {len(found)} findings: {counts}."]
    if by_verdict[DIFFERENT]:
        verdicts.append(f"Different here: {listed(by_verdict[DIFFERENT])}.")
    intro = Prose(
        f"An earlier day-0 benchmark of the same model was made on {THEIR_DEVICE}. Each of its findings is put to this one's "
        "rows by a rule that the last column states. Times of two GPUs are not compared; orders, ratios and shares are."
    )
    columns = ("what they found", "theirs", "ours", "answer", "why")
    table = Table("Their findings and ours", columns, rows, tuple(verdicts))
    return Section("claims", TITLE, (intro, table))
