"""The border to Inspect (`inspect_ai`): our sandboxes as its sandbox environment, and its scorers over our sessions.

`sandbox` is loaded by Inspect itself, through its entry points, where both packages are installed together. `tasks`
makes tasks of Inspect's, and commands for a Python that has it; `inside/` has their modules, which need Inspect and no
package of ours. Nothing else here imports Inspect. Start with `sandbox`.
"""
