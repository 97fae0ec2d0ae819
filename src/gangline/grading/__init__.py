"""Evaluators: (trajectory, artifacts, runtime) -> reward.

An evaluator that cannot give a reward raises EvaluatorError: nothing is scored 0 because *we* broke. Start with
`script`, the general one.
"""
