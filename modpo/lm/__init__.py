"""Policies, the capture of their calls, and the samplers that make tokens."""
