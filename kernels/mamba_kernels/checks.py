"""Argument checks whose messages can be acted upon: which argument, what it is, what is allowed.

A kernel does pointer arithmetic with whatever it is given; a wrong shape is not an exception there
but somebody else's memory. So the public functions check shapes, dtypes, strides and devices, which
costs no device work. What only the *contents* of a tensor tell (is slot 8000 inside the pool? is a
count within 1..1+k?) needs a host sync, and is checked only inside ``with debug_checks():``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

INT_DTYPES = (torch.int32, torch.int64)
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_debug = False


@contextmanager
def debug_checks(enabled: bool = True) -> Iterator[None]:
    """Check contents too (slots, counts, offsets) while inside; each call waits for the device."""
    global _debug
    before, _debug = _debug, enabled
    try:
        yield
    finally:
        _debug = before


def debug_enabled() -> bool:
    return _debug


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None],
    *,
    dtypes: Sequence[torch.dtype] = FLOAT_DTYPES,
    like: torch.Tensor | None = None,
    unit_stride: bool = False,
) -> None:
    """Refuse ``tensor`` unless it fits.

    Args:
        name: the argument's name, for the message.
        shape: expected sizes; None allows any.
        dtypes: allowed dtypes.
        like: must be on this tensor's device.
        unit_stride: neighbours in the last dimension must be neighbours in memory.
    """
    if len(tensor.shape) != len(shape) or any(
        want is not None and got != want for got, want in zip(tensor.shape, shape)
    ):
        want = ", ".join("any" if n is None else str(n) for n in shape)
        want += "," if len(shape) == 1 else ""
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected ({want})")
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(f"{name} has dtype {tensor.dtype}; allowed: {allowed}")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}; expected {like.device}")
    if unit_stride and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} has strides {tensor.stride()}; the last one must be 1 for the Triton kernel "
            f"(pass {name}.contiguous())"
        )


def check_recurrence(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
    D: torch.Tensor, dt_bias: torch.Tensor, ssm_state: torch.Tensor, dt_limit: tuple[float, float],
) -> None:  # fmt: skip
    """Check what every form of the SSM recurrence is given: ``x (T, H, P)``, ``dt (T, H)``, ``B`` and
    ``C (T, G, N)``, three numbers per head, a pool ``(slots, H, P, N)`` and a clamp."""
    check_tensor("x", x, (None, None, None))
    num_tokens, num_heads, head_dim = x.shape
    check_tensor("dt", dt, (num_tokens, num_heads), like=x)
    check_tensor("B", B, (num_tokens, None, None), like=x)
    check_tensor("C", C, B.shape, like=x)
    for name, per_head in (("A", A), ("D", D), ("dt_bias", dt_bias)):
        check_tensor(name, per_head, (num_heads,), like=x, unit_stride=True)
    if B.shape[1] < 1 or num_heads % B.shape[1]:
        raise ValueError(f"B has {B.shape[1]} groups; they must divide the {num_heads} heads of x")
    check_tensor("ssm_state", ssm_state, (None, num_heads, head_dim, B.shape[2]), like=x)
    if not 0.0 <= dt_limit[0] <= dt_limit[1]:
        raise ValueError(f"dt_limit={dt_limit}; expected 0 <= lower <= upper (upper may be inf)")


def check_query_start_loc(query_start_loc: torch.Tensor, like: torch.Tensor) -> int:
    """Check the offsets; returns the number of rows ``R``. In debug also: 0 <= ... <= T, sorted."""
    check_tensor("query_start_loc", query_start_loc, (None,), dtypes=INT_DTYPES, like=like,
                 unit_stride=True)  # fmt: skip
    if query_start_loc.numel() == 0:
        raise ValueError("query_start_loc is empty; expected R + 1 offsets, the first one 0")
    if _debug:
        offsets = query_start_loc.tolist()
        if offsets[0] != 0 or sorted(offsets) != offsets or offsets[-1] > like.shape[0]:
            raise ValueError(
                f"query_start_loc = {offsets}; expected offsets that start at 0, never fall, and "
                f"end at {like.shape[0]} (the rows of the input) or before"
            )
    return query_start_loc.numel() - 1


def check_slots(
    name: str, slots: torch.Tensor, shape: Sequence[int | None], pool: torch.Tensor
) -> None:
    """Check a tensor of slot ids of ``pool``; in debug also their range. 0 (null) is allowed."""
    check_tensor(name, slots, shape, dtypes=INT_DTYPES, like=pool, unit_stride=True)
    if _debug and slots.numel():
        low, high = int(slots.min()), int(slots.max())
        if low < 0 or high >= pool.shape[0]:
            raise ValueError(
                f"{name} holds slot {low if low < 0 else high}; allowed: 1 .. {pool.shape[0] - 1}, "
                f"or 0 to skip (there is no pad slot -1 here)"
            )


def check_num_accepted(num_accepted_tokens: torch.Tensor, num_rows: int, most: int,
                       like: torch.Tensor) -> None:  # fmt: skip
    """Check counts of accepted tokens; in debug also that each is in ``1 .. most``."""
    check_tensor("num_accepted_tokens", num_accepted_tokens, (num_rows,), dtypes=INT_DTYPES,
                 like=like, unit_stride=True)  # fmt: skip
    if _debug and num_rows:
        low, high = int(num_accepted_tokens.min()), int(num_accepted_tokens.max())
        if low < 1 or high > most:
            raise ValueError(
                f"num_accepted_tokens holds {low if low < 1 else high}; allowed: 1 .. {most} "
                f"(the bonus token counts, so never 0)"
            )


def check_row_lengths(query_start_loc: torch.Tensor, most: int) -> None:
    """In debug: no decode row is longer than ``1 + k`` tokens."""
    if _debug and query_start_loc.numel() > 1:
        longest = int(query_start_loc.diff().max())
        if longest > most:
            raise ValueError(
                f"query_start_loc has a row of {longest} tokens; a decode row has at most {most} "
                f"(1 + num_speculative_tokens)"
            )


def check_checkpoints(
    checkpoints: torch.Tensor, query_start_loc: torch.Tensor, pool: torch.Tensor
) -> None:
    """Check *(sequence, end, slot)* triples; in debug also that each lies inside its query."""
    check_tensor("checkpoints", checkpoints, (None, 3), dtypes=INT_DTYPES, like=pool)
    if not checkpoints.is_contiguous():
        raise ValueError(f"checkpoints has strides {checkpoints.stride()}; expected contiguous")
    if _debug:
        lengths = query_start_loc.diff().tolist()
        for seq, end, slot in checkpoints.tolist():
            if not (0 <= seq < len(lengths) and 1 <= end <= lengths[seq]
                    and 0 <= slot < pool.shape[0]):  # fmt: skip
                raise ValueError(
                    f"checkpoints holds (sequence, end, slot) = {(seq, end, slot)}; allowed: one "
                    f"of {len(lengths)} sequences, an end in 1 .. its query length, a slot below "
                    f"{pool.shape[0]}"
                )
