"""A program whose device breaks in the middle of a step: a store to where no memory is. Run by test_device_crash."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parents[1]))
from device_loop import Loop

import kvcanary_trace as kv_canary


@triton.jit
def _store_far(ptr, offset):
    tl.store(ptr + offset, 1)


def main(directory: str) -> None:
    loop = Loop("cuda")
    error = ""
    try:
        with kv_canary.trace(directory, device="cuda", device_rows=True, device_times=True) as session:
            loop.run(loop.launch)
            torch.cuda.synchronize()
            loop.fill(0, 3)
            with kv_canary.step(5000, mode="decode"):
                loop.plan(4)
                loop.verify_and_write(loop.contexts[0], 4)
                _store_far[(1,)](loop.ids, 2**44)
                loop.verify_and_write(loop.contexts[1], 4)
            torch.cuda.synchronize()
    except RuntimeError as broken:
        error = str(broken).splitlines()[0]
    print(json.dumps({"error": error, "published": session.stats.published, "drained": session.stats.drained}))
    sys.stdout.flush()
    os._exit(0)  # the interpreter would abort while it frees what the broken context holds


if __name__ == "__main__":
    main(sys.argv[1])
