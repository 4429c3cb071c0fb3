"""What float8_e4m3 holds here, and the scales. A value is stored as value / scale, a scale multiplies it back."""

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max  # 448

TINY = 1e-30
"""Peak of what is zero throughout: its scale must not be."""

MARGIN = 1.5
"""A delayed scale makes room for 1.5 times the peak that was last seen; what is beyond stops at the largest value."""
