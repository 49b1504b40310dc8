"""A program whose device breaks in the middle of a step: a store to where no memory is. Run by test_device_crash."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import triton
import triton.language as tl

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from test_device_rows import Loop  # noqa: E402

import kvcanary_trace as kv_canary  # noqa: E402


@triton.jit
def _store_far(ptr, offset):
    tl.store(ptr + offset, 1)


def main(directory: str) -> None:
    loop = Loop("cuda")
    error = ""
    try:
        with kv_canary.trace(directory, device="cuda", device_rows=True) as session:
            loop.run(loop.launch)
            torch.cuda.synchronize()
            loop.fill(0, 3)
            with kv_canary.step(5000, mode="decode"):
                _store_far[(1,)](loop.ids, 2**44)
                loop.launch(4)
            torch.cuda.synchronize()
    except RuntimeError as broken:
        error = str(broken).splitlines()[0]
    print(json.dumps({"error": error, "published": session.stats.published, "drained": session.stats.drained}))
    sys.stdout.flush()
    os._exit(0)  # the interpreter would abort while it frees what the broken context holds


if __name__ == "__main__":
    main(sys.argv[1])
