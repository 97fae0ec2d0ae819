"""ProRL Agent's task families: a class with the methods `init`, `run` and `eval`.

Authors subclass `AgentHandler`. A session with harness `handler` and evaluator `handler` calls the methods in the
node's stages: `init` in INIT, `run` in RUN, `eval` in POSTRUN. Start with `contract`.
"""

from gangline.interop.handlers.contract import AgentHandler, JobDetails, LLMConfig

__all__ = ["AgentHandler", "JobDetails", "LLMConfig"]
