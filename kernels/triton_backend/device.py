"""What the launchers must know about a device, looked up once."""

from __future__ import annotations

from functools import cache

import torch
from triton import knobs

INTERPRETED = bool(knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on the CPU, one program after another."""

_skipped: dict[torch.device, torch.Tensor] = {}


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors to fill. The interpreter gets a few, so that grid strides are walked there too."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def skipped_entries(device: torch.device) -> torch.Tensor:
    """Entries left out because they lay outside a buffer, a map or a row.

    Returns:
        [1] int64 on `device`, counting up for the life of the process. Every launch there adds to the same word.
    """
    counter = _skipped.get(device)
    if counter is None:
        if device.type == "cuda" and device.index is None:  # another name of the current device, whose counter it is
            return skipped_entries(torch.device("cuda", torch.cuda.current_device()))
        counter = _skipped.setdefault(device, torch.zeros(1, dtype=torch.int64, device=device))
    return counter
