"""The measured difference of shares from weights, against the same figure by hand."""

import numpy as np
import pytest

from dwslm.data.describe import share_errors
from dwslm.data.mixture import MixtureSettings
from dwslm.data.packing import PackingSettings
from tests.data.in_memory import dataset, stream


def test_share_errors_are_those_of_every_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dwslm.data.describe.SHARES_EVERY", 64)
    text = dataset([("a", n) for n in range(5, 60)] + [("b", n) for n in range(3, 40)])
    rows = stream(
        text, PackingSettings(32, 8, window_tokens=512), mixture=MixtureSettings(weights={"a": 3.0, "b": 1.0})
    )
    (short, long) = share_errors(rows, 8192, stretches=(300, 2000))
    pairs = [rows.batch(row, 2) for row in range(0, 256, 2)]
    served = np.array([np.bincount(text.docs["source"][b.docs[b.docs >= 0]], np.diff(b.cu_seqlens)[b.docs >= 0] - 1, 2)
                       for b in pairs])  # fmt: skip
    for found, stretch in ((short, 300), (long, 2000)):
        worst, count = 0.0, 0
        for begin in range(len(served)):
            total = np.zeros(2)
            for part in served[begin:]:
                total += part
                if total.sum() >= stretch:
                    worst, count = max(worst, abs(total[0] / total.sum() - 0.75)), count + 1
                    break
        assert found == {"context": 32, "stretch": stretch, "stretches": count, "worst": pytest.approx(worst)}
    assert long["worst"] < short["worst"]
    assert share_errors(rows, 8192, stretches=(10**6,)) == []
