"""Real OTLP services on loopback, over HTTP and gRPC, that decode what arrives; and ones that misbehave."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

from opentelemetry.proto.collector.logs.v1 import logs_service_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

Behaviour = Literal["accept", "hang", "503", "die"]

_REQUESTS = {
    "traces": trace_service_pb2.ExportTraceServiceRequest,
    "metrics": metrics_service_pb2.ExportMetricsServiceRequest,
    "logs": logs_service_pb2.ExportLogsServiceRequest,
}
_RESPONSES = {
    "traces": trace_service_pb2.ExportTraceServiceResponse,
    "metrics": metrics_service_pb2.ExportMetricsServiceResponse,
    "logs": logs_service_pb2.ExportLogsServiceResponse,
}


def value_of(value: Any) -> Any:
    """An AnyValue as a Python value."""
    kind = value.WhichOneof("value")
    return None if kind is None else getattr(value, kind)


def attributes_of(message: Any) -> dict[str, Any]:
    """The attributes of a span, an event, a record, a data point or a resource."""
    return {item.key: value_of(item.value) for item in message.attributes}


@dataclass
class Received:
    """What arrived, decoded; filled by the receiver's threads."""

    port: int = 0
    requests: list[tuple[str, Any]] = field(default_factory=list)
    attempts: int = 0
    arrived: threading.Condition = field(default_factory=threading.Condition)

    @property
    def endpoint(self) -> str:
        """For OTEL_EXPORTER_OTLP_ENDPOINT."""
        return f"http://127.0.0.1:{self.port}"

    def add(self, signal: str, body: bytes) -> None:
        """Decode and keep one request."""
        message = _REQUESTS[signal].FromString(body)
        with self.arrived:
            self.requests.append((signal, message))
            self.arrived.notify_all()

    def attempt(self) -> None:
        """Count a request, whatever becomes of it."""
        with self.arrived:
            self.attempts += 1
            self.arrived.notify_all()

    def wait_for_attempts(self, number: int, timeout_s: float = 10.0) -> bool:
        """Wait until that many requests came."""
        with self.arrived:
            return self.arrived.wait_for(lambda: self.attempts >= number, timeout_s)

    def of(self, signal: str) -> list[Any]:
        """Requests of one signal."""
        with self.arrived:
            return [message for kind, message in self.requests if kind == signal]

    @property
    def spans(self) -> list[Any]:
        """All spans."""
        return [
            span
            for request in self.of("traces")
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    @property
    def records(self) -> list[Any]:
        """All log records."""
        return [
            record
            for request in self.of("logs")
            for resource in request.resource_logs
            for scope in resource.scope_logs
            for record in scope.log_records
        ]

    @property
    def metrics(self) -> dict[str, Any]:
        """The last state of each metric, by name."""
        return {
            metric.name: metric
            for request in self.of("metrics")
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def points(self, name: str, **wanted: Any) -> list[Any]:
        """Data points of a metric whose attributes `kv_canary.<name>` are as wanted."""
        metric = self.metrics[name]
        points = getattr(metric, metric.WhichOneof("data")).data_points
        return [
            point
            for point in points
            if all(attributes_of(point).get(f"kv_canary.{key}") == value for key, value in wanted.items())
        ]

    def number(self, name: str, **wanted: Any) -> float:
        """The value of the one data point that is as wanted."""
        (point,) = self.points(name, **wanted)
        return float(getattr(point, point.WhichOneof("value")))


@contextmanager
def http_receiver(behaviour: Behaviour = "accept", *, retry_after_s: float = 1.0, port: int = 0) -> Iterator[Received]:
    """An OTLP/HTTP service. `hang` takes requests and never answers, `503` asks to come back, `die` closes midway."""
    received = Received()
    release = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            received.attempt()
            body = self.rfile.read(int(self.headers["content-length"]))
            if behaviour == "hang":
                release.wait()
                self.close_connection = True
                return
            if behaviour == "die":
                self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\nonly this much")
                self.close_connection = True
                self.connection.close()
                return
            if behaviour == "503":
                self.send_response(503)
                self.send_header("retry-after", str(retry_after_s))
                self.send_header("content-length", "0")
                self.end_headers()
                return
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            signal = self.path.rpartition("/")[2]
            received.add(signal, body)
            answer = _RESPONSES[signal]().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: Any) -> None:
            pass  # a client that left is what some tests are about

    server = Server(("127.0.0.1", port), Handler)
    received.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield received
    finally:
        release.set()
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def grpc_receiver() -> Iterator[Received]:
    """An OTLP/gRPC service."""
    import grpc

    received = Received()

    def method(signal: str) -> Any:
        def export(body: bytes, _: Any) -> bytes:
            received.attempt()
            received.add(signal, body)
            return bytes(_RESPONSES[signal]().SerializeToString())

        return grpc.unary_unary_rpc_method_handler(export)

    services = {
        "traces": "trace.v1.TraceService",
        "metrics": "metrics.v1.MetricsService",
        "logs": "logs.v1.LogsService",
    }
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    for signal, service in services.items():
        name = f"opentelemetry.proto.collector.{service}"
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"Export": method(signal)}),))
    received.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield received
    finally:
        server.stop(None).wait()
