"""Linear-attention engines that training does not use: FlashQLA. Imported when asked for."""

import importlib
from collections.abc import Sequence

from torch import Tensor

from dwslm.bench.case import Run
from dwslm.ops.segments import Segments


def flash_qla(scale: float) -> Run:
    """Gated DeltaNet by FlashQLA (TileLang), one decay a head.

    Raises:
        ValueError: where it cannot be imported.
    """
    try:
        call = importlib.import_module("flash_qla").chunk_gated_delta_rule
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        raise ValueError(f"flash_qla cannot be used ({error})") from error

    def run(inputs: Sequence[Tensor], segments: Segments) -> tuple[Tensor, ...]:
        q, k, v, g, beta = (x[None] for x in inputs)
        # New boundaries each time: the library keeps tables by the identity of their tensor.
        out = call(q=q, k=k, v=v, g=g, beta=beta, scale=scale, cu_seqlens=segments.cu_seqlens.long())
        return ((out[0] if isinstance(out, tuple) else out)[0],)

    return run
