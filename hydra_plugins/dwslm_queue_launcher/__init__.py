"""Hydra's --multirun hands its jobs to the queue, see docs/queue.md. A namespace package: hydra_plugins has no __init__.py."""
