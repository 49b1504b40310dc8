"""The torch backend's two paths, for tests that hold on both."""

from __future__ import annotations

import pytest

from kvcanary_trace.kernels import torch_backend
from kvcanary_trace.kernels.backend import use_backend


@pytest.fixture(params=["host", "any-device"])
def torch_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Launch on the torch backend: through numpy views of CPU tensors, or the way that other devices go."""
    if request.param == "any-device":
        monkeypatch.setattr(torch_backend, "_on_host", lambda tensor: False)
    with use_backend("torch"):
        yield request.param
