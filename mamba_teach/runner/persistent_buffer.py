"""Persistent buffers: tensors that a step refills and never replaces.

A captured CUDA graph reads the addresses it saw at capture. So whatever changes from step to step has
to arrive in memory that stays: one buffer per quantity and group, made once, as long as there can be
*requests* in a step, and refilled from the front before each use. What lies behind the last request
is padding, and what padding means (the null slot, a count of 1) belongs to the quantity, so the
buffer knows it.
"""

from __future__ import annotations

import torch


class PersistentBuffer:
    """A tensor with a fixed address, a row per request, and a value for the rows nobody uses.

    Attributes:
        tensor: ``(num_rows, *columns)``, on the device.
        padding: what rows and columns without content hold.
    """

    def __init__(
        self,
        name: str,
        num_rows: int,
        *columns: int,
        padding: int,
        device: torch.device,
        dtype: torch.dtype = torch.int32,
    ) -> None:
        self.name = name
        self.padding = padding
        self.tensor = torch.full((num_rows, *columns), padding, dtype=dtype, device=device)

    def refill(self, values: torch.Tensor, num_rows: int | None = None) -> torch.Tensor:
        """Put ``values`` in front and padding behind them.

        Args:
            values: ``(R, *columns)`` on any device; may have fewer columns than the buffer.
            num_rows: rows of the view to return, at least ``R``; None: ``R``.

        Returns:
            A view of the first ``num_rows`` rows; the same address every time.

        Raises:
            ValueError: there are more rows or columns than the buffer has.
        """
        num_rows = len(values) if num_rows is None else num_rows
        fits = all(v <= b for v, b in zip(values.shape, self.tensor.shape, strict=True))
        if not fits or not len(values) <= num_rows <= len(self.tensor):
            raise ValueError(
                f"{self.name}: values of shape {tuple(values.shape)} for {num_rows} rows do not fit "
                f"into the buffer of shape {tuple(self.tensor.shape)}"
            )
        whole = values.shape[1:] == self.tensor.shape[1:]
        self.tensor[len(values) if whole else 0 :] = self.padding
        self.tensor[tuple(slice(size) for size in values.shape)].copy_(values, non_blocking=True)
        return self.tensor[:num_rows]
