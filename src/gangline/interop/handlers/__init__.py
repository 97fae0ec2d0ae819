"""Task families as ProRL Agent has them: one class with the methods `init`, `run` and `eval`.

Authors subclass `AgentHandler`. A session of harness `handler` and evaluator `handler` calls the methods in
the stages of a node: `init` in INIT, `run` in RUN, `eval` in POSTRUN. Start with `contract`.
"""

from gangline.interop.handlers.contract import AgentHandler, JobDetails, LLMConfig

__all__ = ["AgentHandler", "JobDetails", "LLMConfig"]
