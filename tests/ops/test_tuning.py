"""Variants compiled together: the autotuner finds all of them ready, and picks what it would have picked."""

import pytest
import torch


@pytest.mark.gpu
def test_all_variants_are_compiled_before_the_first_is_timed(monkeypatch, tmp_path):
    triton = pytest.importorskip("triton")
    tl = triton.language
    from triton.runtime.autotuner import Autotuner

    from dwslm.ops.tuning import compile_together

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compile_together()

    @triton.autotune([triton.Config({"BLOCK": 2**n}, num_warps=w) for n in (5, 7, 9) for w in (1, 4)], key=["size"])
    @triton.jit
    def doubled(x, y, size, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + i, 2 * tl.load(x + i, mask=i < size), mask=i < size)

    ready = []
    bench = Autotuner._bench

    def counted(self, *args, config, **meta):
        ready.append(len(self.fn.device_caches[torch.cuda.current_device()][0]))
        return bench(self, *args, config=config, **meta)

    monkeypatch.setattr(Autotuner, "_bench", counted)
    x = torch.randn(1000, device="cuda")
    y = torch.empty_like(x)
    doubled[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](x, y, 1000)
    assert torch.equal(y, 2 * x)
    assert ready == [6] * 6
