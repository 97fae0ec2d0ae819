"""Suites by which plug-ins are checked: runtimes, harnesses, adapters to trainers. Product code never imports it.

`runtime_conformance/`, `harness_conformance`, `adoption_conformance` and `trainer_conformance` check promises;
`hostility/` attacks a runtime from inside. For an engine in tests see `gangline.serving.scripted`.
Start with `runtime_conformance`.
"""
