"""Tracing of engines that know nothing of this package: SGLang in place, and OpenTelemetry's way of switching it on."""
