"""What float8 holds here, e4m3 but for what is bounded, and the scales.

A value is stored as value / scale, a scale multiplies it back.
"""

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max  # 448

BOUNDED = torch.float8_e5m2
BOUNDED_STEPS = 2.0**15
"""What is at most 1 in magnitude is stored in e5m2 times this: 1 is well inside its 57,344, and its least number is 2^-31."""

TINY = 1e-30
"""Peak of what is zero throughout: its scale must not be."""

MARGIN = 1.5
"""A delayed scale makes room for 1.5 times the peak that was last seen; what is beyond stops at the largest value."""
