"""Where telemetry goes: the providers that the host set, else private ones built from the standard `OTEL_*` variables.

Nothing here ever sets a global provider. Importing this file needs no OpenTelemetry: what is missing is one sentence.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from kvcanary_trace import names
from kvcanary_trace.errors import SettingError

from .otel_names import SCOPE

if TYPE_CHECKING:
    from kvcanary_trace.runfile import Run

    from .otel_export import Exporting, Troubles

__all__ = ["Providers", "is_configured", "open_providers"]

_log: Final = logging.getLogger(names.LOGGER)

SIGNALS: Final = ("traces", "metrics", "logs")
NEEDED: Final = "pip install 'opentelemetry-sdk>=1.30' 'opentelemetry-exporter-otlp-proto-http>=1.30'"
_PROTOCOLS: Final = ("http/protobuf", "grpc")
_API: Final = {
    "traces": ("opentelemetry.trace", "get_tracer_provider"),
    "metrics": ("opentelemetry.metrics", "get_meter_provider"),
    "logs": ("opentelemetry._logs", "get_logger_provider"),
}
_EXPORTER_CLASS: Final = {
    "traces": ("trace_exporter", "OTLPSpanExporter"),
    "metrics": ("metric_exporter", "OTLPMetricExporter"),
    "logs": ("_log_exporter", "OTLPLogExporter"),
}
_CONSOLE_CLASS: Final = {
    "traces": ("opentelemetry.sdk.trace.export", ("ConsoleSpanExporter",)),
    "metrics": ("opentelemetry.sdk.metrics.export", ("ConsoleMetricExporter",)),
    "logs": ("opentelemetry.sdk._logs.export", ("ConsoleLogRecordExporter", "ConsoleLogExporter")),
}


@dataclass(slots=True)
class Providers:
    """What a session emits to. A signal that is off is None."""

    tracer: Any | None = None
    meter_provider: Any | None = None
    logger: Any | None = None
    own_tracer: bool = False
    """Whether the tracer is ours: it then keeps all that is given to it, the choice having been made before."""
    exports: dict[str, Exporting] = field(default_factory=dict)
    """Our export threads, by signal."""
    servers: list[Any] = field(default_factory=list)
    """(server, reader) of Prometheus endpoints."""


def is_configured(environ: Mapping[str, str] | None = None) -> bool:
    """Whether OpenTelemetry is in use here: the host set a provider, or the environment an endpoint or exporter."""
    environ = os.environ if environ is None else environ
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    return any(_asked_for(signal, environ) or host_provider(signal) is not None for signal in SIGNALS)


def host_provider(signal: str) -> Any | None:
    """The provider that the host set for a signal, or None. Imports nothing: who set one has imported it."""
    module_name, getter = _API[signal]
    module = sys.modules.get(module_name)
    if module is None:
        return None
    try:
        provider = getattr(module, getter)()
    except Exception:  # a provider named in the environment that does not load
        return None
    return None if type(provider).__name__.lstrip("_").startswith("Proxy") else provider


def _asked_for(signal: str, environ: Mapping[str, str]) -> bool:
    kinds = environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip().lower()
    if kinds:
        return kinds != "none"
    return bool(
        environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT")
    )


def open_providers(run: Run, *, troubles: Troubles, everything: bool) -> Providers:
    """The providers of a session.

    Args:
        run: For the resource of our own providers.
        troubles: Where exports report that they fail.
        everything: Whether a signal that is not configured goes to the default endpoint; else it is off.

    Raises:
        ImportError: OpenTelemetry is missing or half installed.
        SettingError: a variable names an exporter or a protocol that is unknown.
    """
    providers = Providers()
    trace = import_module("opentelemetry.trace")
    import_module("opentelemetry.metrics")
    resource: Any = None
    for signal in SIGNALS:
        kinds = os.environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip().lower()
        host = host_provider(signal)
        if host is None and (kinds == "none" or not (everything or _asked_for(signal, os.environ))):
            continue
        if resource is None and host is None:
            resource = _resource(run)
        try:
            if signal == "traces":
                provider = host if host is not None else _own_tracer_provider(resource, providers, troubles, kinds)
                providers.own_tracer = host is None
                providers.tracer = trace.get_tracer(SCOPE, _version(), tracer_provider=provider)
            elif signal == "metrics":
                providers.meter_provider = (
                    host if host is not None else _own_meter_provider(resource, providers, troubles, kinds)
                )
            else:
                provider = host if host is not None else _own_logger_provider(resource, providers, troubles, kinds)
                providers.logger = provider.get_logger(SCOPE, _version())
        except _OffError as off:
            _log.warning("OpenTelemetry %s are off: %s", signal, off)
    return providers


class _OffError(Exception):
    """One signal cannot be exported; the message says what to do."""


def _version() -> str:
    from kvcanary_trace import __version__

    return __version__


def _resource(run: Run) -> Any:
    resources = import_module("opentelemetry.sdk.resources")
    attributes: dict[str, Any] = {
        "service.name": "kvcanary-trace",
        "service.instance.id": f"{run.run}.{run.rank}",
        "host.name": run.host,
        "process.pid": run.pid,
    }
    # What the user says about the service beats what we know.
    given = resources.OTELResourceDetector().detect().attributes
    return resources.Resource.create({name: value for name, value in attributes.items() if name not in given})


def _exporter(signal: str, kinds: str) -> Any:
    """The exporter of a signal from its variables."""
    kind = kinds.split(",")[0].strip() or "otlp"
    if kind == "console":
        module_name, class_names = _CONSOLE_CLASS[signal]
        module = import_module(module_name)
        return next(getattr(module, name) for name in class_names if hasattr(module, name))()
    if kind != "otlp":
        others = "otlp, prometheus, console or none" if signal == "metrics" else "otlp, console or none"
        raise SettingError(f"OTEL_{signal.upper()}_EXPORTER must be {others}, got {kinds!r}")
    variables = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next((os.environ[name].strip() for name in variables if os.environ.get(name)), "http/protobuf")
    if protocol not in _PROTOCOLS:
        raise SettingError(f"OTEL_EXPORTER_OTLP_PROTOCOL must be {' or '.join(_PROTOCOLS)}, got {protocol!r}")
    folder, class_name = _EXPORTER_CLASS[signal]
    package = "grpc" if protocol == "grpc" else "http"
    try:
        module = import_module(f"opentelemetry.exporter.otlp.proto.{package}.{folder}")
    except ImportError as error:
        if protocol != "grpc":
            raise
        raise _OffError(
            f"protocol grpc needs its exporter ({error}): pip install 'kvcanary-trace[otlp-grpc]', or set "
            "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf"
        ) from None
    more: dict[str, Any] = {}
    if signal == "metrics" and not os.environ.get("OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION"):
        sdk = import_module("opentelemetry.sdk.metrics")
        views = import_module("opentelemetry.sdk.metrics.view")
        more["preferred_aggregation"] = {sdk.Histogram: views.ExponentialBucketHistogramAggregation()}
    return getattr(module, class_name)(**more)


def _queue(kind: Any, what: str, prefix: str, exporter: Any, troubles: Troubles) -> Any:
    from .otel_export import number_of

    return kind(
        what,
        exporter,
        troubles,
        max_items=int(number_of(f"{prefix}_MAX_QUEUE_SIZE", 2048, 1)),
        max_batch=int(number_of(f"{prefix}_MAX_EXPORT_BATCH_SIZE", 512, 1)),
        interval_s=number_of(f"{prefix}_SCHEDULE_DELAY", 5000 if prefix == "OTEL_BSP" else 1000, 1) / 1e3,
    )


def _own_tracer_provider(resource: Any, providers: Providers, troubles: Troubles, kinds: str) -> Any:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    from .otel_export import SpanQueue

    queue = _queue(SpanQueue, "spans", "OTEL_BSP", _exporter("traces", kinds), troubles)
    provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(queue)
    providers.exports["spans"] = queue
    return provider


def _own_logger_provider(resource: Any, providers: Providers, troubles: Troubles, kinds: str) -> Any:
    from opentelemetry.sdk._logs import LoggerProvider

    from .otel_export import LogQueue

    queue = _queue(LogQueue, "log records", "OTEL_BLRP", _exporter("logs", kinds), troubles)
    provider = LoggerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_log_record_processor(queue)
    providers.exports["log_records"] = queue
    return provider


def _own_meter_provider(resource: Any, providers: Providers, troubles: Troubles, kinds: str) -> Any:
    from opentelemetry.sdk.metrics import MeterProvider

    from .otel_export import MetricExports, number_of

    readers: list[Any] = []
    for kind in (kinds or "otlp").split(","):
        if kind.strip() == "prometheus":
            readers.append(_prometheus(providers))
            continue
        exports = MetricExports(
            _exporter("metrics", kind),
            troubles,
            interval_s=number_of("OTEL_METRIC_EXPORT_INTERVAL", 60_000, 1) / 1e3,
            timeout_s=number_of("OTEL_METRIC_EXPORT_TIMEOUT", 30_000, 1) / 1e3,
        )
        providers.exports["metrics"] = exports
        readers.append(exports.reader)
    return MeterProvider(metric_readers=readers, resource=resource, shutdown_on_exit=False)


def _prometheus(providers: Providers) -> Any:
    """The SDK's Prometheus reader, served on the standard host and port."""
    try:
        exporter = import_module("opentelemetry.exporter.prometheus")
        client = import_module("prometheus_client")
    except ImportError as error:
        raise _OffError(
            f"the Prometheus endpoint needs its reader ({error}): pip install 'kvcanary-trace[prometheus]'"
        ) from None
    registry = client.CollectorRegistry()  # ours: the host's own metrics stay at the host's own endpoint
    host = os.environ.get("OTEL_EXPORTER_PROMETHEUS_HOST", "localhost")
    port = os.environ.get("OTEL_EXPORTER_PROMETHEUS_PORT", "9464")
    try:
        reader = exporter.PrometheusMetricReader(registry=registry)
        server, _ = client.start_http_server(int(port), addr=host, registry=registry)
    except (OSError, ValueError, TypeError) as error:
        raise _OffError(f"the Prometheus endpoint cannot be served at {host}:{port}: {error}") from None
    providers.servers.append(server)
    return reader
