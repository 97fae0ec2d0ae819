"""Conformance suites for plug-ins: runtimes, harnesses, evaluators, trainer adapters. Product code never imports it.

`runtime_conformance/`, `harness_conformance`, `evaluator_conformance`, `adoption_conformance` and `trainer_conformance`
check the plug-in contracts. Attacks from inside a runtime are only in the repository, in `tests/support/hostility`. For
an engine in tests see `gangline.serving.scripted`. Start with `runtime_conformance`.
"""
