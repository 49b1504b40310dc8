"""Both chain definitions, as the host's verify and write use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from ..buffers import VerifyOrWriteContext, is_parallel
from ..hashing import ANCHOR_HASH
from ..parallel_chain import PARALLEL_ANCHOR_HASH
from . import host_chain, host_parallel
from .host_arrays import I64, U64


class Chain(NamedTuple):
    """A definition: what a head stores, what a record's successor stores, what a batch's tokens store."""

    anchor_hash: np.uint64
    successors: Callable[[U64, U64, U64], None]
    chain_hashes: Callable[[U64, I64, I64, U64, U64, U64], None]


_SERIAL: Final = Chain(np.uint64(ANCHOR_HASH), host_chain.successors, host_chain.chain_hashes)
_PARALLEL: Final = Chain(np.uint64(PARALLEL_ANCHOR_HASH), host_parallel.successors, host_parallel.chain_hashes)


def chains_of(context: VerifyOrWriteContext) -> tuple[Chain, Chain]:
    """The chain that a context declares, and the other one."""
    return (_PARALLEL, _SERIAL) if is_parallel(context) else (_SERIAL, _PARALLEL)
