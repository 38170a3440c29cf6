"""A command through the in-pod agent beside an exec of the API server in the same pod, turn by turn, and many
pods at once; what is left in the cluster afterwards. A list of pods as the watch reads it beside the client's
own models (`--only-list` needs no cluster).

python tests/benchmarks/bench_kubernetes.py --repeats 30 --count 60 --commands 10
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import aiohttp
from bench_sandboxes import Bench, environment, percentile
from kubernetes_asyncio.client import ApiClient

from agentrl.types import SandboxSpec
from envs.sandbox.contract import ExecRequest
from envs.sandbox.kubernetes import KubernetesBackend
from envs.sandbox.kubernetes_api import Cluster
from envs.sandbox.kubernetes_pod import Placement
from envs.sandbox.kubernetes_watch import read_list

sys.path.insert(0, str(Path(__file__).parent.parent / "sandbox"))
from listed import page


async def exec_by_server(cluster: Cluster, namespace: str, pod: str) -> None:
    """Run `true` as `kubectl exec` does: a websocket for one command, until its streams end."""
    async with await cluster.exec(namespace, pod, "sandbox", ["true"]) as ws:
        said = b""
        async for message in ws:
            if message.type is aiohttp.WSMsgType.BINARY and message.data[:1] == b"\x03":
                said = message.data[1:]
    assert json.loads(said)["status"] == "Success", said


async def agent_beside_exec(
    backend: KubernetesBackend, image: str, namespace: str, repeats: int
) -> dict[str, float | None]:
    """Milliseconds of `true` by either way, alternating, so that both see the same machine."""
    spec = SandboxSpec(image=image, memory_mib=64, disk_mib=16, pids=32)
    box = await backend.create(spec, image=image, session="bench")
    cluster = Cluster()
    agent: list[float] = []
    server: list[float] = []
    for number in range(repeats):
        begun = time.perf_counter()
        result = await box.exec(ExecRequest(exec_id=f"b{number}", argv=("true",)))
        agent.append((time.perf_counter() - begun) * 1000)
        assert result.exit_code == 0
        begun = time.perf_counter()
        await exec_by_server(cluster, namespace, box.info.id)
        server.append((time.perf_counter() - begun) * 1000)
    await box.close()
    await cluster.close()
    ours, theirs = percentile(agent, 0.5), percentile(server, 0.5)
    return {
        "agent_p50_ms": ours,
        "api_exec_p50_ms": theirs,
        "api_exec_over_agent": theirs / ours if ours and theirs else None,
    }


async def list_beside_models(count: int) -> dict[str, float | None]:
    """CPU milliseconds that a list of so many pods costs, the best of three."""
    data = page(0, count)

    async with ApiClient() as client:
        ways = {
            "list_ms": lambda: read_list(data),
            "list_json_ms": lambda: json.loads(data),
            "list_models_ms": lambda: client.deserialize(SimpleNamespace(data=data), "V1PodList"),
        }
        costs: dict[str, float] = {}
        for name, way in ways.items():
            tries = []
            for _ in range(3):
                begun = time.process_time()
                way()
                tries.append(1000 * (time.process_time() - begun))
            costs[name] = min(tries)
    return {**costs, "list_models_over_ours": costs["list_models_ms"] / costs["list_ms"]}


async def left(namespace: str, backend: KubernetesBackend) -> int:
    cluster = Cluster()
    try:
        found = await cluster.call(
            "GET",
            f"/api/v1/namespaces/{namespace}/pods",
            phase="bench",
            deadline_s=30,
            params={"labelSelector": f"agentrl.backend={backend.id}"},
        )
    finally:
        await cluster.close()
    return len(found["items"])


async def bench(
    repeats: int, count: int, commands: int, at_once: int, reach: str, namespace: str
) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        placement = Placement(namespace=namespace, reach=reach)
        backend = KubernetesBackend(Path(folder) / "state", placement=placement)
        await asyncio.to_thread(backend.check)
        image = await backend.prepare(str(environment(Path(folder))))
        result: dict[str, object] = {"reach": backend.reach}
        result |= await agent_beside_exec(backend, image, namespace, repeats)
        run = Bench(backend, image, commands)
        begun = time.perf_counter()
        await run.run(count, at_once)
        result |= {"count": count, "commands": commands, "wall_s": time.perf_counter() - begun}
        result |= {"most_creates_at_once": backend.pressure.peak}
        for what, values in run.times.items():
            result |= {f"{what}_p50_ms": percentile(values, 0.5), f"{what}_p95_ms": percentile(values, 0.95)}
        result["ends"] = {end: run.ends.count(end) for end in sorted(set(run.ends))}
        counts = backend.pods.counts
        result |= {"watches": counts.watches, "lists": counts.lists, "events": counts.events}
        await backend.close()
        result |= {"leaked": backend.leaked, "pods_left": await left(namespace, backend)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30, help="commands by each way in one pod")
    parser.add_argument("--count", type=int, default=60, help="pods alive together")
    parser.add_argument("--commands", type=int, default=10, help="commands in each of them")
    parser.add_argument("--at-once", type=int, default=60, help="sandboxes in creation at the same time")
    parser.add_argument(
        "--reach", choices=("auto", "pod", "exec"), default="auto", help="how pods are reached"
    )
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--pods", type=int, default=2000, help="pods in a list")
    parser.add_argument("--only-list", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result: dict[str, object] = dict(asyncio.run(list_beside_models(options.pods)))
    if not options.only_list:
        result |= asyncio.run(
            bench(
                options.repeats,
                options.count,
                options.commands,
                options.at_once,
                options.reach,
                options.namespace,
            )
        )
    if options.json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        print(f"{key:24} {value:10.2f}" if isinstance(value, float) else f"{key:24} {value!s:>10}")


if __name__ == "__main__":
    main()
