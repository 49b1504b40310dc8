"""Kernels compile for a Hopper device on a machine without one: Triton's compiler needs no driver, only a target.

In a process of their own, since the interpreter that other tests run in replaces the compiler.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

COMPILE = """
import importlib, json, re, subprocess, sys, tempfile, warnings
from pathlib import Path

warnings.simplefilter("ignore")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

INT32 = {"num_valid_ptr", "enable_ptr", "num_valid_reqs_ptr", "write_index_ptr", "assert_flag_ptr"}
INT32 |= {"verify_num_valid_ptr", "verify_enable_ptr", "violation_index_ptr"}
DUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def type_of(name):
    if name.endswith("_ptr"):
        return "*u8" if name == "canary_ptr" else "*i32" if name in INT32 else "*i64"
    return "i64" if name.startswith("address") else "i32"


for line in sys.stdin:
    module, name, constants, options = json.loads(line)
    kernel = getattr(importlib.import_module("kvcanary_trace.kernels.triton_backend." + module), name)
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else type_of(n) for n in names}
    values = {(i,): constants[n] for i, n in enumerate(names) if n in constants}
    aligned = [i for i, n in enumerate(names) if n.endswith("_ptr") or n.startswith("address")]
    source = ASTSource(kernel, signature, values, {(i,): [["tt.divisibility", 16]] for i in aligned})
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    registers = None
    if DUMP.exists():
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(built.asm["cubin"])
            file.flush()
            told = subprocess.run([DUMP, "-res-usage", file.name], capture_output=True, text=True, check=True)
        registers = int(re.search(r"REG:(\\d+)", told.stdout + told.stderr)[1])
    print(json.dumps([name, len(built.asm["cubin"]), registers]), flush=True)
"""

VERIFY = {"CHECK_TOKEN": True, "NUM_SOURCES": 0, "PAGED": False, "CHUNK": 2, "BLOCK": 256}
WRITE = {"CHECK_INPUT": True, "PAIRED": True, "HAS_SOURCES": False, "BLOCKS": 128}
FOLD = {"PAIRED": True, "NUM_SOURCES": 1, "PAGED": True, "CHUNK": 16, "BLOCK": 32}
ON_DEVICE = {"INTERPRETED": False}
FOUR_WARPS = {"num_warps": 4}
KERNELS = [
    ("verify", "_verify_kernel", VERIFY | {"PARALLEL": False}, FOUR_WARPS | {"maxnreg": 64}),
    ("verify", "_verify_kernel", VERIFY | {"PARALLEL": True}, FOUR_WARPS | {"maxnreg": 64}),
    ("write_parallel", "_compose_blocks_kernel", {"PAIRED": True, "BLOCK": 256}, FOUR_WARPS),
    ("write_parallel", "_write_parallel_kernel", WRITE | {"ALONE": False, "BLOCK": 256}, FOUR_WARPS),
    ("write_parallel", "_write_parallel_kernel", WRITE | {"ALONE": True, "BLOCK": 1024}, {"num_warps": 8}),
    ("write_fold", "_fold_tokens_kernel", FOLD, {"num_warps": 1}),
    ("record", "_probe_kernel", ON_DEVICE | {"WINDOWED": True, "MARKED": True, "BLOCK": 4096}, {"num_warps": 8}),
    ("record", "_mark_kernel", ON_DEVICE, {"num_warps": 1}),
    ("record", "_span_kernel", ON_DEVICE, {"num_warps": 1}),
    ("record", "_publish_kernel", ON_DEVICE, {"num_warps": 1}),
]


def test_kernels_compile_for_hopper(tmp_path: object) -> None:
    """Kernels that know the parallel chain, and those that record, as the launches ask for them on a device."""
    pytest.importorskip("triton.backends.nvidia", reason="needs Triton's NVIDIA compiler")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        input="\n".join(json.dumps(kernel) for kernel in KERNELS),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    built = [json.loads(line) for line in done.stdout.splitlines()]
    assert [name for name, *_ in built] == [name for _, name, *_ in KERNELS]
    for _, size, registers in built:
        assert size > 0
        assert registers is None or registers < 255, built  # at 255 the compiler spills
