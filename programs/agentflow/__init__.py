"""AgentFlow: planner, executor, verifier and generator around tools and a memory (arXiv 2510.05592)."""

from modpo.programs.agentflow.flow import AgentFlow
from modpo.programs.agentflow.memory import Entry, Memory
from modpo.programs.agentflow.roles import Execute, Generate, Plan, Verify

__all__ = ["AgentFlow", "Entry", "Execute", "Generate", "Memory", "Plan", "Verify"]
