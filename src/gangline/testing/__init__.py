"""Suites by which plug-ins are checked: runtimes, harnesses, adapters to trainers. Product code never imports it.

`runtime_conformance/`, `harness_conformance`, `adoption_conformance` and `trainer_conformance` check promises. Attacks
from inside a runtime are in the repository alone, in `tests/support/hostility`. For an engine in tests see
`gangline.serving.scripted`.
Start with `runtime_conformance`.
"""
