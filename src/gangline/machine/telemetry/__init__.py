"""Telemetry for operators: numbers (Prometheus), log lines with stable actions, traces (OpenTelemetry).

`actions` lists every log action, `logs` formats lines, `exposition` exports metrics, and `traces` sends spans. Start
with `actions`.
"""
