"""A small agent of its own, for sandboxes that have nothing but a Python: the standard library, one loop.

It is the smallest program that uses a model as any third-party agent does: a base URL and a key from the
environment, `chat/completions` with one tool, a shell. It shares no code with the harness, and is written
into the sandbox as a file.

    python3 loop.py        the instruction is in AGENTRL_INSTRUCTION
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from typing import Any

MAX_STEPS = 50
COMMAND_S = 60
SHOWN_CHARS = 8000
SYSTEM = "You solve the task with shell commands. Answer without a command when you are done."
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a shell command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps({"model": "policy", "messages": messages, "tools": [TOOL]}).encode(),
        headers={
            "content-type": "application/json",
            "authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
        },
    )
    with urllib.request.urlopen(request) as response:
        message: dict[str, Any] = json.load(response)["choices"][0]["message"]
    return message


def act(arguments: str) -> str:
    try:
        command = str(json.loads(arguments)["command"])
    except (ValueError, KeyError) as error:
        return f"error: {error}"
    try:
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, timeout=COMMAND_S, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return f"timed out after {COMMAND_S} s"
    return f"{done.stdout}{done.stderr}"[:SHOWN_CHARS] or f"(exit status {done.returncode})"


def main() -> int:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": os.environ["AGENTRL_INSTRUCTION"]},
    ]
    for _ in range(MAX_STEPS):
        reply = ask(messages)
        messages.append(reply)
        calls = reply.get("tool_calls") or []
        if not calls:
            return 0
        for call in calls:
            text = act(call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
    return 0


if __name__ == "__main__":
    sys.exit(main())
