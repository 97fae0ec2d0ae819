"""Telemetry for operators: numbers (Prometheus), log lines with stable actions, traces (OpenTelemetry)."""
