"""A chart by Helm's own library: `python render_chart.py CHART` with lists of values on stdin, as JSON.

Prints for each [findings of `helm lint`, text of `helm template`, or the error].
"""

from __future__ import annotations

import json
import sys

import helm_python  # pyright: ignore[reportMissingImports]


def main() -> None:
    answers: list[tuple[object, str]] = []
    for values in json.load(sys.stdin):
        lint = helm_python.lint(sys.argv[1], values, strict=True)
        with helm_python.Chart.load(sys.argv[1]) as chart:
            try:
                files = chart.render(values, name="prod", namespace="agents")
            except helm_python.HelmError as error:
                answers.append((lint, f"error: {error}"))
            else:
                answers.append((lint, "\n---\n".join(text for name, text in files.items() if name.endswith(".yaml"))))
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
