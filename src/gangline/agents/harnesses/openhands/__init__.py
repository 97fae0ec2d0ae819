"""Harness `openhands`: the default agent of the OpenHands SDK (Python packages `openhands-sdk`, `openhands-tools`).

The SDK is a library: `runner.py` is a script, uploaded to the runtime, that runs one conversation with it. The command
line of OpenHands is older than the SDK and requires exactly Python 3.12. Start with `adapter`.
"""
