"""OpenTelemetry's way of switching tracing on: `opentelemetry-instrument python -m sglang.launch_server …`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[import-not-found,attr-defined,unused-ignore]

from .sglang import instrument, uninstrument

__all__ = ["KvCanaryInstrumentor"]


class KvCanaryInstrumentor(BaseInstrumentor):  # type: ignore[misc,unused-ignore]
    """Puts hooks around SGLang's canary; spans and metrics go to the providers that are configured."""

    def instrumentation_dependencies(self) -> Collection[str]:
        """What must be installed for it to make sense."""
        return ("sglang >= 0.5.23",)

    def _instrument(self, **kwargs: Any) -> None:
        instrument()

    def _uninstrument(self, **kwargs: Any) -> None:
        uninstrument()
