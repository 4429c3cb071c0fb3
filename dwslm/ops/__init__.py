"""Kernels: one folder each, with `reference.py` (the float32 truth), one file per engine, and the choice in `__init__.py`."""
