"""Launching with as little host time as it takes: compiled kernels are kept by what they were compiled for.

Triton's own launch binds, specialises and hashes some forty arguments each time, which costs several times the launch.
Our kernels take pointers, then sizes, then constants, and are specialised on nothing but the constants and on pointers
being multiples of 16; so a dictionary finds the handle. Whatever is out of the ordinary goes Triton's way.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from .device import INTERPRETED

_INT32_MIN: Final = -(2**31)
_INT32_MAX: Final = 2**31 - 1
_ALIGN_MASK: Final = 15
NO_OPTIONS: Final[Mapping[str, int]] = MappingProxyType({})
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    num_programs: int,
    tensors: tuple[Tensor, ...],
    sizes: tuple[int, ...],
    addresses: tuple[int, ...],
    constants: tuple[int, ...],
    num_warps: int,
    options: Mapping[str, int] = NO_OPTIONS,
) -> None:
    """Run `kernel` on the current stream of the tensors' device.

    Args:
        kernel: A `triton.jit` function whose parameters are `tensors`, `sizes`, `addresses` and `constants`, in this
            order, not specialised on `sizes`.
        num_programs: Its grid, at least 1.
        tensors: Passed as pointers.
        sizes: Integers, specialised on nothing.
        addresses: Integers, specialised on being multiples of 16.
        constants: Its `tl.constexpr` parameters.
        num_warps: Warps a program.
        options: Further options of Triton's compiler, always the same for the same kernel and constants.
    """
    if INTERPRETED:
        kernel[(num_programs,)](*tensors, *sizes, *addresses, *constants, num_warps=num_warps, **options)
        return
    device = tensors[0].get_device()
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, num_programs, tensors, sizes, addresses, constants, num_warps, options)
        return
    pointers = [tensor.data_ptr() for tensor in tensors]
    low_bits = 0
    for pointer in pointers:
        low_bits |= pointer
    for address in addresses:
        low_bits |= address
    if low_bits & _ALIGN_MASK or (sizes and (max(sizes) > _INT32_MAX or min(sizes) < _INT32_MIN)):
        kernel[(num_programs,)](*tensors, *sizes, *addresses, *constants, num_warps=num_warps, **options)
        return
    key = (kernel, device, num_warps, constants)
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[(num_programs,)](
            *tensors, *sizes, *addresses, *constants, num_warps=num_warps, **options
        )
        return
    compiled.run(
        num_programs,
        1,
        1,
        torch._C._cuda_getCurrentRawStream(device),
        compiled.function,
        compiled.packed_metadata,
        None,
        None,
        None,
        *pointers,
        *sizes,
        *addresses,
        *constants,
    )
