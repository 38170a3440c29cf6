"""Programs for processes with the real `openenv-core`: a server of a typed environment, and a client.

The package alone is small; what it needs for its web pages (gradio, fastmcp, openai) is large and has no part
in the protocol, so names of theirs that are not installed stand for nothing here.
"""

from __future__ import annotations

LIGHT = """\
import importlib.util, sys, types


class Meta(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class Nothing(metaclass=Meta):
    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return getattr(Nothing, name)


def light(name):
    module = types.ModuleType(name)
    module.__path__ = []
    module.__getattr__ = lambda key: getattr(Nothing, key)
    sys.modules[name] = module


for name in ("gradio", "fastmcp", "openai", "requests", "huggingface_hub"):
    if importlib.util.find_spec(name) is None:
        light(name)
        if name == "fastmcp":
            light("fastmcp.client")
            light("fastmcp.client.client")
"""

SERVER = (
    LIGHT
    + '''
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
import uvicorn


class Guess(Action):
    """Guess the number."""

    number: int


class Told(Observation):
    hint: str = ""


class Numbers(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.number, self.steps = 0, 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.number, self.steps = (seed or 0) % 10, 0
        return Told(hint="Find a number between 0 and 9.")

    def step(self, action, timeout_s=None, **kwargs):
        self.steps += 1
        if action.number == 13:
            raise RuntimeError("the server broke")
        right = action.number == self.number
        hint = "yes" if right else "higher" if action.number < self.number else "lower"
        return Told(hint=hint, done=right, reward=1.0 if right else 0.0)

    @property
    def state(self):
        return State(step_count=self.steps)


uvicorn.run(
    create_fastapi_app(Numbers, Guess, Told, max_concurrent_envs=8),
    host="127.0.0.1", port=int(sys.argv[1]), log_level="error", ws="websockets-sansio",
)
'''
)

CLIENT = (
    LIGHT
    + """
import asyncio, json
from openenv.core.env_server.mcp_types import CallToolAction
from openenv.core.generic_client import GenericEnvClient
from openenv.core.mcp_client import MCPToolClient

url, calls = sys.argv[1], json.loads(sys.argv[2])


async def main():
    seen = []
    async with GenericEnvClient(base_url=url) as env:
        first = await env.reset(seed=5)
        for name, arguments in calls:
            result = await env.step({"tool": name, "arguments": arguments})
            seen.append([result.observation["text"], result.reward, result.done])
        state = await env.state()
    async with MCPToolClient(base_url=url) as env:
        await env.reset(seed=5)
        tools = await env.list_tools()
        name, arguments = calls[0]
        called = await env.step(CallToolAction(tool_name=name, arguments=arguments))
    print(json.dumps({
        "instruction": first.observation["instruction"], "seen": seen, "steps": state["step_count"],
        "tools": [tool.name for tool in tools], "called": called.observation.result,
    }))


asyncio.run(main())
"""
)
