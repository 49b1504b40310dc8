"""SGLang 0.5.23's own canary manager, endpoints and launchers, run from its wheel with stand-ins for the model side.

What exists in the unpacked wheel under `REAL` is the real module; any other `sglang.*` module is made up on import,
with a class for every name that is asked of it. The stand-ins that matter are written out below.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peer
import torch

REAL = ("sglang/kernels/ops/kv_canary/", "sglang/srt/kv_canary/", "sglang/srt/plugins/", "sglang/srt/environ.py")
WIDTH, SLOTS, POOL_ROWS = 64, 512, 9


class ForwardMode(IntEnum):
    """The modes that the canary asks about."""

    EXTEND = 1
    DECODE = 2
    MIXED = 3
    IDLE = 4
    TARGET_VERIFY = 5
    DRAFT_EXTEND_V2 = 6

    def is_decode_or_idle(self) -> bool:
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_mixed(self) -> bool:
        return self is ForwardMode.MIXED

    def is_target_verify(self) -> bool:
        return self is ForwardMode.TARGET_VERIFY

    def is_draft_extend_v2(self) -> bool:
        return self is ForwardMode.DRAFT_EXTEND_V2

    def is_extend(self) -> bool:
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED)


class ForwardBatch(SimpleNamespace):
    """One forward's tensors."""


class _PhaseChecker:
    """Of the host instead of the device."""

    def __init__(self, *, initial_phase: int, device: torch.device) -> None:
        self._phase = int(initial_phase)

    def update(self, *, expect_phase: int, next_phase: int, caller_name: str) -> None:
        assert self._phase == int(expect_phase), caller_name
        self._phase = int(next_phase)

    def enable_assert(self) -> None:
        pass


class _Handler:
    """Takes a tensor at once: there is no device to wait for."""

    def __init__(self, **_: Any) -> None:
        pass

    def step(self, *, compute_on_device: Any, postprocess_on_host: Any) -> None:
        found = compute_on_device()
        if found is not None:
            postprocess_on_host(found)


class Scheduler:
    """Runs batches as SGLang's does: counts forwards, lets the model runner take them."""

    def __init__(self, runner: Any, canaries: list[Any]) -> None:
        self.forward_ct = 0
        self.waiting_queue: list[Any] = []
        self.running_batch = SimpleNamespace(reqs=[], seq_lens_cpu=None)
        self.max_total_num_tokens = SLOTS
        self.token_to_kv_pool_allocator = SimpleNamespace(available_size=lambda: SLOTS - 100)
        self.tree_cache = SimpleNamespace(evictable_size=lambda: 40)
        self._runner = runner
        self._canaries = canaries

    def run_batch(self, batch: Any) -> str:
        """One forward of each model."""
        self.forward_ct += 1
        for canary in self._canaries:
            self._runner(canary, batch.forward_batch)
        return "result"


_STAND_INS: dict[str, dict[str, Any]] = {
    "sglang.kernels.jit.utils": {
        "cache_once": lru_cache(maxsize=None),
        "load_jit": None,
        "make_cpp_args": lambda *args: ", ".join(map(str, args)),
    },
    "sglang.srt.utils": {
        "create_device_stream": lambda device: None,
        "is_device_stream_capturing": lambda device: False,
    },
    "sglang.srt.utils.phase_checker": {"SimplePhaseChecker": _PhaseChecker},
    "sglang.srt.kv_canary.runner.future_tensor": {"DelayedDeviceHostHandler": _Handler},
    "sglang.srt.model_executor.forward_batch_info": {"ForwardBatch": ForwardBatch, "ForwardMode": ForwardMode},
    "sglang.srt.managers.scheduler": {"Scheduler": Scheduler},
    "sglang.srt.runtime_context": {
        "get_exec": lambda: SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=None)),
        "get_spec": lambda: SimpleNamespace(speculative_num_draft_tokens=None, speculative_num_steps=None),
        "get_schedule": lambda: SimpleNamespace(max_prefill_tokens=32, chunked_prefill_size=16),
        "get_disagg": lambda: SimpleNamespace(disaggregation_mode="null"),
        "get_parallel": lambda: SimpleNamespace(enable_prefill_cp=False),
        "get_observability": lambda: SimpleNamespace(
            kv_canary="log", kv_canary_real_data="none", kv_canary_sweep_interval=0
        ),
    },
    "sglang.srt.platforms": {
        "current_platform": SimpleNamespace(capabilities=SimpleNamespace(graph_capture=False), is_cuda=lambda: False)
    },
    "sglang.srt.model_executor.cuda_graph_config": {
        "Backend": SimpleNamespace(DISABLED=0, TC_PIECEWISE=1),
        "Phase": SimpleNamespace(DECODE=0, PREFILL=1),
        "check_cuda_graph_backend": lambda phase, backend: backend == 0,
    },
}


_PLAIN = ("sglang.kernels.ops.kv_canary",)
"""Packages of the wheel whose own `__init__` wants parts that are not here."""


class _MadeUp(types.ModuleType):
    """A module that has a class for every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `sglang.*`: in the unpacked wheel, else made up."""

    def __init__(self, root: Path, missing: frozenset[str]) -> None:
        self._root = root
        self._missing = missing

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.partition(".")[0] != "sglang" or fullname.rpartition(".")[2][0].isupper():
            return None  # a class is no module
        if fullname in self._missing:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        relative = fullname.replace(".", "/")
        if fullname not in (*_STAND_INS, *_PLAIN):
            for file, package in ((f"{relative}/__init__.py", True), (f"{relative}.py", False)):
                if file.startswith(REAL) and (self._root / file).is_file():
                    folders = [str((self._root / file).parent)] if package else None
                    return importlib.util.spec_from_file_location(
                        fullname, self._root / file, submodule_search_locations=folders
                    )
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        # A package with real modules in it must not make up classes of their names.
        return types.ModuleType(spec.name) if spec.name in _PLAIN else _MadeUp(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []
        vars(module).update(_STAND_INS.get(module.__name__, {}))
        if module.__name__ == "sglang.srt.managers.scheduler":  # hooks of SGLang's registry stay where they are
            module.Scheduler = type("Scheduler", (Scheduler,), {"run_batch": Scheduler.run_batch})  # type: ignore[attr-defined]


def unpacked() -> Path:
    """The folder with the wheel's modules; skips the test where the wheel cannot be had."""
    wheel = peer._wheel()
    target = peer._cache() / f"{wheel.stem}-server"
    if not (target / ".complete").is_file():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target, [name for name in archive.namelist() if name.startswith(REAL)])
        (target / ".complete").touch()
    return target


@contextmanager
def sglang_importable(missing: frozenset[str] = frozenset()) -> Iterator[None]:
    """`import sglang.…` works in here, freshly; skips the test where the wheel cannot be had."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "sglang"}
    for name in before:
        del sys.modules[name]
    finder = _Finder(unpacked(), missing)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
            del sys.modules[name]
        sys.modules.update(before)


class Server:
    """A model runner with SGLang's real canary on its pool, a model that does nothing, and a scheduler."""

    def __init__(self, *, draft: bool = False) -> None:
        api = importlib.import_module("sglang.srt.kv_canary.api")
        group = importlib.import_module("sglang.srt.kv_canary.buffer_group")
        self.req_to_token = torch.arange(1, POOL_ROWS * WIDTH + 1, dtype=torch.int32).reshape(POOL_ROWS, WIDTH) % SLOTS
        self.k_head, self.k_tail = (torch.zeros(SLOTS, 32, dtype=torch.uint8) for _ in range(2))
        groups = (
            group.CanaryBufferGroup(
                kind=group.PoolKind.FULL,
                k_head=self.k_head,
                k_tail=self.k_tail,
                v_head=None,
                v_tail=None,
                real_kv_sources_k=(),
                real_kv_sources_v=(),
                swa_index_lut=None,
                kv_token_id_vs_position_offset=0,
            ),
        )
        api.attach_canary_buffers = lambda **_: groups
        pool = SimpleNamespace(size=POOL_ROWS - 1, req_to_token=self.req_to_token, max_context_len=WIDTH)
        self.canaries = []
        for is_draft in (False, True) if draft else (False,):
            model = SimpleNamespace(forward=lambda batch: "logits")
            runner = SimpleNamespace(
                device="cpu",
                is_draft_worker=is_draft,
                token_to_kv_pool=None,
                token_to_kv_pool_allocator=None,
                req_to_token_pool=pool,
                max_total_num_tokens=100,
                sliding_window_size=None,
                model=model,
                tp_rank=1,
                tp_size=2,
                pp_rank=0,
                pp_size=1,
                dp_rank=None,
                gpu_id=1,
            )
            manager = api.install_canary(server_args=SimpleNamespace(tp_size=2, api_key="secret"), model_runner=runner)
            self.canaries.append(SimpleNamespace(manager=manager, model=model))
        self.scheduler = importlib.import_module("sglang.srt.managers.scheduler").Scheduler(self.forward, self.canaries)

    def forward(self, canary: Any, batch: ForwardBatch) -> None:
        """What `ModelRunner.forward` does about the canary."""
        with (
            canary.manager.with_ops_outside_graph(single_forward_indices=[0], maybe_inaccurate_forward_batch=batch),
            canary.manager.with_active_single_forward_manager(0),
        ):
            assert canary.model.forward(batch) == "logits"

    def run(self, mode: ForwardMode, prefixes: list[int], extends: list[int], waiting: int = 0) -> Any:
        """One step of the scheduler: a request of each prefix and extend, `waiting` queued ones of 5 tokens."""
        rows = torch.arange(1, len(prefixes) + 1)
        spans = list(zip(rows.tolist(), prefixes, extends, strict=True))
        positions = torch.cat([torch.arange(p, p + e) for _, p, e in spans]) if spans else torch.zeros(0).long()
        slots = torch.cat([self.req_to_token[min(r, POOL_ROWS - 1), p : p + e].long() for r, p, e in spans])
        batch = ForwardBatch(
            batch_size=len(prefixes),
            positions=positions,
            input_ids=positions + 7,
            out_cache_loc=slots,
            req_pool_indices=rows,
            forward_mode=mode,
            spec_info=None,
            seq_lens=torch.tensor(prefixes) + torch.tensor(extends),
            extend_prefix_lens=torch.tensor(prefixes),
            extend_seq_lens=torch.tensor(extends),
            req_all_ids_lens=None,
        )
        reqs = [SimpleNamespace() for _ in prefixes]
        lengths = torch.tensor([p + e for _, p, e in spans])
        scheduled = SimpleNamespace(reqs=reqs, seq_lens_cpu=lengths, forward_mode=mode, forward_batch=batch)
        if mode is ForwardMode.DECODE:
            self.scheduler.running_batch = scheduled
        queue = self.scheduler.waiting_queue
        queue.extend(SimpleNamespace(origin_input_ids=[0] * 5, output_ids=[]) for _ in range(waiting - len(queue)))
        return self.scheduler.run_batch(scheduled)
