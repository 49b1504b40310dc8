"""Both chain definitions through torch's operations, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from ..hashing import ANCHOR_HASH, mix3_tensor, signed
from ..layout import SlotField
from ..parallel_chain import PARALLEL_ANCHOR_HASH, maps_tensor, scan_tensor, step_tensor


def successors(words: Tensor, slots: Tensor, parallel: bool) -> Tensor:
    """What the slot after each of `slots` stores as its chain hash; the anchor's after a negative one."""
    records = words[slots.clamp(min=0)]
    step, anchor_hash = (step_tensor, PARALLEL_ANCHOR_HASH) if parallel else (mix3_tensor, ANCHOR_HASH)
    hashes = step(records[:, SlotField.PREV_HASH], records[:, SlotField.TOKEN], records[:, SlotField.POSITION])
    return torch.where(slots < 0, signed(anchor_hash), hashes)


def chain_hashes(steps: Tensor, seeds: Tensor, tokens: Tensor, positions: Tensor, parallel: bool) -> Tensor:
    """What each token of a batch stores.

    Args:
        steps: [n] int64, a token's place in its chain; chains lie one after another.
        seeds: [n] int64, what the token's chain starts with.
        tokens: [n] int64.
        positions: [n] int64.
        parallel: Which chain.

    Returns:
        [n] int64.
    """
    if parallel:
        multipliers, addends = maps_tensor(tokens.roll(1), positions.roll(1))
        heads = steps == 0  # a constant map: nothing of the chain before gets past it
        return scan_tensor(torch.where(heads, 0, multipliers), torch.where(heads, seeds, addends))
    hashes = torch.where(steps == 0, seeds, 0)
    for step in range(int(steps.max())):
        going = torch.nonzero(steps == step + 1).squeeze(1)
        before = going - 1
        hashes[going] = mix3_tensor(hashes[before], tokens[before], positions[before])
    return hashes
