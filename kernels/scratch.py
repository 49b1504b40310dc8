"""Scratch tensors that launches reuse, so that a launch allocates nothing once its stream is warm."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

_threads = threading.local()


def scratch_words(name: str, device: torch.device, length: int) -> Tensor:
    """[>= length] int64 that no launch still in flight can share, contents undefined.

    One per name, thread and stream; a graph that is being captured gets one of its own, which lives as long as it does.
    """
    stream = 0
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return torch.empty(length, dtype=torch.int64, device=device)
        stream = torch.cuda.current_stream(device).cuda_stream
    held: dict[tuple[str, torch.device, int], Tensor] | None = getattr(_threads, "held", None)
    if held is None:
        held = _threads.held = {}
    scratch = held.get((name, device, stream))
    if scratch is None or scratch.shape[0] < length:
        scratch = held[name, device, stream] = torch.empty(length, dtype=torch.int64, device=device)
    return scratch
