"""Evaluators: (trajectory, artifacts, runtime) -> reward.

An evaluator that cannot determine a reward raises EvaluatorError: a failure of ours never counts as 0. Start with
`script`, the general one.
"""
