"""Probability of a breach within the horizon. `benchmarks/prediction.py --fit` writes this: do not edit.

Fitted 2026-12-01 to 691,200 steps at risk, drawn from the first halves of 48 replays
(3,917,108 steps) of the Azure 2023, Mooncake and coding-conversation traces; see docs/prediction.md.
"""

from __future__ import annotations

from typing import Final

__all__ = ["ALARM_PROBABILITY", "CALIBRATED", "HIGH_NODES", "LOGITS", "RETRACTION_PROBABILITY", "ROOM_NODES", "STEPS"]

CALIBRATED: Final = ("write_req", "verify", "kv_pool")
"""Capacities that the table was fitted to and checked on; others have no probability."""

ALARM_PROBABILITY: Final = 0.06
"""From here on a breach is claimed: the highest recall and lead among thresholds with at most 2 false claims in 10 000
steps, on the halves that the table was fitted to."""

RETRACTION_PROBABILITY: Final = 0.55
"""The same of a KV pool that is full to 0.99: there a breach is a retraction, and a pool may be full without one."""

ROOM_NODES: Final = (0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 1.1, 1.3, 1.5, 1.75, 2.1, 2.7, 4.0)
"""log(1 + room): the limit less expected work, over the recent rise within a horizon plus 1 % of the limit."""

HIGH_NODES: Final = (-1.6, -1.1, -0.8, -0.6, -0.45, -0.3, -0.2, -0.1, -0.04, 0.0, 0.04, 0.2, 0.5)
"""log of the highest demand of the last 10 000 steps over the limit."""

# fmt: off
# ruff: noqa: E501
LOGITS: Final = (
    (0.289, 0.289, 0.289, 0.289, 0.289, 0.289, 0.289, 0.289, 0.289, 0.289, 0.918, 1.540, 2.331),
    (-1.316, -1.316, -1.316, -1.316, -1.316, -1.316, -1.316, -1.316, -1.210, -1.209, -0.896, -0.303, 1.027),
    (-2.263, -2.258, -2.207, -2.207, -2.207, -2.141, -2.141, -2.096, -2.026, -2.026, -1.484, -0.832, 0.241),
    (-2.890, -2.662, -2.495, -2.495, -2.495, -2.421, -2.409, -2.277, -2.215, -2.215, -1.623, -0.832, -0.211),
    (-3.058, -2.746, -2.569, -2.569, -2.569, -2.553, -2.553, -2.450, -2.356, -2.356, -1.871, -1.310, -0.796),
    (-3.118, -2.914, -2.737, -2.737, -2.737, -2.737, -2.737, -2.737, -2.737, -2.737, -2.431, -2.141, -1.390),
    (-3.411, -3.207, -3.031, -3.031, -3.031, -3.031, -3.031, -3.031, -3.031, -3.031, -2.794, -2.447, -2.226),
    (-3.763, -3.608, -3.479, -3.479, -3.479, -3.479, -3.468, -3.468, -3.411, -3.371, -3.030, -2.994, -2.994),
    (-4.159, -4.159, -4.159, -4.159, -4.159, -4.159, -3.965, -3.963, -3.925, -3.910, -3.745, -3.659, -3.454),
    (-4.628, -4.628, -4.628, -4.628, -4.628, -4.628, -4.567, -4.460, -4.460, -4.460, -4.230, -4.169, -3.574),
    (-5.757, -5.757, -5.757, -5.757, -5.757, -5.757, -5.603, -5.390, -5.373, -5.373, -5.227, -4.954, -4.460),
    (-7.331, -7.331, -7.331, -7.331, -7.331, -7.255, -7.113, -6.965, -6.897, -6.863, -6.786, -6.472, -5.745),
    (-8.973, -8.973, -8.973, -8.973, -8.973, -8.973, -8.936, -8.874, -8.825, -8.778, -8.704, -8.355, -7.457),
    (-10.180, -10.180, -10.180, -10.180, -10.180, -10.180, -10.180, -10.180, -10.180, -10.180, -10.180, -10.180, -9.747),
)
"""[room, high] log-odds at the nodes; linear between them, constant beyond."""

STEPS: Final = (
    (9, 122, 298),
    (13, 122, 336),
    (30, 152, 392),
    (31, 152, 392),
    (50, 201, 430),
    (90, 270, 445),
    (112, 299, 461),
    (174, 356, 481),
    (188, 356, 481),
    (247, 383, 494),
    (269, 395, 494),
    (281, 400, 494),
    (283, 400, 494),
    (283, 400, 494),
)
"""[room] steps until a breach that comes within the horizon: 10 %, half, 90 %."""
