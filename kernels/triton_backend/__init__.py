"""The Triton backend: the same results as the torch backend, on a GPU or in Triton's interpreter.

Nothing here allocates, synchronises or reads back on the launch path, so every function may run inside a captured CUDA
graph, once the first launch on the device is over (it allocates one counter and compiles).
"""

from __future__ import annotations

from .device import skipped_entries
from .plan import plan, plan_entries, plan_offsets
from .verify import verify
from .write import write

__all__ = ["plan", "plan_entries", "plan_offsets", "skipped_entries", "verify", "write"]
