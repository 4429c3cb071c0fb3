"""Variants of a Triton kernel compiled side by side, before its autotuner times them one after the other.

Most of a first call's minutes go into compiling: more than a hundred variants for one delta rule, one at a time on one core.
Triton compiles in threads when it is asked to; its autotuner doesn't ask.
"""

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any


@functools.cache
def compile_together() -> None:
    """From now on, for every autotuned kernel of this process. Triton before 3.5 goes on compiling one by one."""
    from triton.runtime.autotuner import Autotuner

    try:
        from triton.runtime._async_compile import AsyncCompileMode
    except ImportError:
        return
    prune = Autotuner.prune_configs

    def prune_and_compile(self: Any, kwargs: dict[str, Any]) -> list[Any]:
        # Called once for each case to be tuned, right before the first variant runs.
        configs = prune(self, kwargs)
        call = {name: value for name, value in kwargs.items() if name != "warmup"}
        threads = ThreadPoolExecutor(max(1, min(len(configs), os.cpu_count() or 1)))
        # One that fails to compile fails again when its turn comes, and is left out by the autotuner.
        with threads, AsyncCompileMode(threads, ignore_errors=True):
            for config in configs:
                self.fn.warmup(*self.nargs.values(), **call, **config.all_kwargs())
        return configs

    Autotuner.prune_configs = prune_and_compile
