"""A linear layer that takes the faster of a CPU's two matrix libraries.

PyTorch multiplies float32 matrices on x86 with MKL, whose widest instructions are for its maker's
processors only; oneDNN, in the same wheel, uses those of any. On an AMD processor with AVX-512 prompts
take half the time in these layers and decode steps two thirds. Nothing else changes: both compute in
float32. The operation is the one that ``torch.compile`` puts in the place of ``F.linear``. It has no
gradient, so where somebody trains (or records, or uses another type or device, or has a build without
oneDNN) it is ``F.linear`` as ever.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from mamba_kernels.cpu_rows import host_may_read

HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class Linear(nn.Linear):
    """``nn.Linear`` to everybody else: same parameters, same names, same result up to rounding."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        float32 = input.dtype == self.weight.dtype == torch.float32
        if HAS_ONEDNN and float32 and input.numel() and host_may_read(input):
            return torch.ops.mkldnn._linear_pointwise(input, self.weight, self.bias, "none", [], "")
        return F.linear(input, self.weight, self.bias)
