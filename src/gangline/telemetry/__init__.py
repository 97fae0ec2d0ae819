"""What operators see from outside: numbers (Prometheus), log lines with stable actions, traces (OpenTelemetry)."""
