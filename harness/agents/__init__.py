"""Agents that are not ours: a process in the session's sandbox that knows a base URL and a key, and people.

Read `command` (the agent), `bridge` (its requests, out of the sandbox and back), `inside` (the bridge's far
end) and `catalogue` (agents by name).
"""
