"""agentrl turns tasks into trustworthy evidence and evidence into better policies."""

__version__ = "0.1.0"
