"""What the Kubernetes backend decides without a cluster: whose fault an end is, what a pod may do, and that a
line of calls survives any sequence of dropped connections."""

# ruff: noqa: ASYNC110  (waiting for what another task does is what these tests do)

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import json
import os
import shutil
import socket
import ssl
import struct
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from listed import page, wanted

from agentrl.errors import ExecUnknown, SandboxError, SandboxLost
from envs.sandbox import kubernetes_witness as witness
from envs.sandbox.agent import Inbox, frames
from envs.sandbox.kubernetes import _label, _version
from envs.sandbox.kubernetes_api import ApiUnknown, Cluster, Gone
from envs.sandbox.kubernetes_ends import end_of, start_problem, unschedulable
from envs.sandbox.kubernetes_images import KubernetesImages
from envs.sandbox.kubernetes_line import Dropped, Line, Received
from envs.sandbox.kubernetes_pod import Placement, manifest
from envs.sandbox.kubernetes_watch import PAGE, Pods

# ------------------------------------------------------------------------------------------------ ends


def pod(status: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p", "uid": "u", **metadata}, "spec": {}, "status": status}


def container(name: str, **state: Any) -> dict[str, Any]:
    return {"name": name, "image": "some/image:1", "state": state}


def failed(reason: str, message: str = "") -> dict[str, Any]:
    return {"phase": "Failed", "reason": reason, "message": message}


def ended(name: str, **how: Any) -> dict[str, Any]:
    others = [] if name == "witness" else [container("witness", running={})]
    return {"phase": "Running", "containerStatuses": [*others, container(name, terminated=how)]}


ENDS = {
    "starts": ({"phase": "Pending"}, None),
    "evicted by its node, no container known": (
        failed("Evicted", "The node was low on resource: ephemeral-storage."),
        ("evicted", "environment", True),
    ),
    "evicted for its own disk": (
        failed("Evicted", 'Container sandbox exceeded its local ephemeral storage limit "32Mi". '),
        ("disk_quota", "policy", False),
    ),
    "evicted for what we laid into it": (
        failed("Evicted", 'Usage of EmptyDir volume "place" exceeds the limit "16Mi". '),
        ("disk_quota", "environment", False),
    ),
    "preempted": (failed("Preempting"), ("preempted", "environment", True)),
    "preempted, as newer clusters say it": (
        {
            "phase": "Failed",
            "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}],
        },
        ("preempted", "environment", True),
    ),
    "its node is gone": ({"phase": "Unknown", "reason": "NodeLost"}, ("node_lost", "environment", True)),
    "its node shuts down": (failed("Shutdown"), ("node_lost", "environment", True)),
    "its node was full after all": (failed("OutOfmemory"), ("node_full", "environment", True)),
    "older than any sandbox": (failed("DeadlineExceeded"), ("pod_deadline", "environment", False)),
    "the agent was killed; a container's flag says nothing about a command": (
        ended("sandbox", exitCode=137, reason="OOMKilled"),
        ("agent_died", "environment", True),
    ),
    "the witness ended by itself": (ended("witness", exitCode=0), ("lease_over", "environment", True)),
    "the witness died": (ended("witness", exitCode=137), ("witness_died", "environment", True)),
    "no rules could be made": (
        ended("witness", exitCode=70, message='{"code": "no_fence"}'),
        ("no_fence", "environment", False),
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_status_says_whose_fault_an_end_is(name: str) -> None:
    status, expected = ENDS[name]
    end = end_of(pod(status))
    assert (None if end is None else (end.code, end.owner, end.retryable)) == expected
    if end is not None:
        assert end.evidence["pod"] == "p"
        assert end.evidence["reason"] == status.get("reason")
        assert end.witness_lives == (end.code == "agent_died")


def test_a_pod_that_runs_has_not_ended_and_one_that_is_being_deleted_has() -> None:
    both = [container("witness", running={}), container("sandbox", running={})]
    status = {"phase": "Running", "containerStatuses": both}
    assert end_of(pod(status)) is None
    end = end_of(pod(status, deletionTimestamp="2026-01-01T00:00:00Z"))
    assert end is not None
    assert end.code == "pod_deleted"


WAITS = {
    "a first pull that failed": (("ErrImagePull", "toomanyrequests: rate limit"), None),
    "pulls that keep failing": (
        ("ImagePullBackOff", "Back-off pulling"),
        ("image_pull", "environment", True),
    ),
    "an image that nobody has": (
        ("ErrImagePull", "manifest for a/b:1 not found"),
        ("image_missing", "environment", False),
    ),
    "a name that is none": (("InvalidImageName", "bad"), ("image_missing", "environment", False)),
    "no Python": (
        ("RunContainerError", 'exec: "python3": executable file not found in $PATH'),
        ("no_python", "task", False),
    ),
    "a container that the runtime refuses": (
        ("CreateContainerError", "context deadline exceeded"),
        ("start_refused", "environment", True),
    ),
    "still being made": (("ContainerCreating", ""), None),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_a_start_waits_for_says_whether_it_will_come(name: str) -> None:
    (reason, message), expected = WAITS[name]
    waiting = container("sandbox", waiting={"reason": reason, "message": message})
    end = start_problem(pod({"phase": "Pending", "containerStatuses": [waiting]}))
    assert (None if end is None else (end.code, end.owner, end.retryable)) == expected


def test_unschedulable_is_what_the_scheduler_says_and_nothing_else() -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    assert unschedulable(pod({"phase": "Pending", "conditions": [condition]})) == "0/1 nodes"
    assert unschedulable(pod({"phase": "Pending"})) is None
    assert end_of(pod({"phase": "Pending", "conditions": [condition]})) is None


# ------------------------------------------------------------------------------------------------ pods


def test_a_pod_may_do_no_more_than_it_must() -> None:
    made = manifest(wanted())
    spec = made["spec"]
    assert spec["restartPolicy"] == "Never"
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert spec["activeDeadlineSeconds"] == 3600
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    shared = {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace", "serviceAccountName"}
    assert not shared & set(spec)
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "agentrl-a", "uid": "1"}
    assert made["metadata"]["ownerReferences"] == [owner]
    by_name = {c["name"]: c for c in spec["containers"]}
    for c in by_name.values():
        security = c["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["privileged"] is False
        assert security["capabilities"]["drop"] == ["ALL"]
        limits, asked = c["resources"]["limits"], c["resources"]["requests"]
        for held in ("memory", "ephemeral-storage"):
            assert limits[held] == asked[held]
        assert "cpu" in limits
    dangerous = {"NET_ADMIN", "SYS_ADMIN", "NET_RAW", "SYS_PTRACE", "DAC_READ_SEARCH", "SYS_MODULE"}
    given = {name: set(c["securityContext"]["capabilities"]["add"]) for name, c in by_name.items()}
    assert not dangerous & given["sandbox"]
    assert dangerous & given["witness"] == {"NET_ADMIN"}
    memory = f"{100 + 20 + 64}Mi"
    limits = {"cpu": "2000m", "memory": memory, "ephemeral-storage": "32Mi"}
    assert by_name["sandbox"]["resources"]["limits"] == limits
    mounts = {m["mountPath"]: m for m in by_name["sandbox"]["volumeMounts"]}
    assert mounts["/tests"]["readOnly"] is True
    assert "/opt/agentrl/place" not in mounts
    assert "env" not in by_name["sandbox"]


def test_a_trusting_placement_and_a_newer_cluster_need_fewer_capabilities() -> None:
    old = manifest(wanted(sized=False))["spec"]["containers"][0]["securityContext"]["capabilities"]["add"]
    new = manifest(wanted(placement=Placement(fence="policy", priority="a", runtime_class="gvisor")))["spec"]
    capabilities = new["containers"][0]["securityContext"]["capabilities"]["add"]
    assert set(old) - set(capabilities) == {"NET_ADMIN", "SYS_ADMIN"}
    assert new["priorityClassName"] == "a-verifier"
    assert new["runtimeClassName"] == "gvisor"
    live = manifest(wanted(mounts=(), placement=Placement(priority="a")))["spec"]
    assert live["priorityClassName"] == "a-live"


@given(st.text(max_size=200))
@settings(max_examples=60, deadline=None)
def test_any_session_has_a_label_that_kubernetes_accepts(text: str) -> None:
    label = _label(text)
    assert 0 < len(label) <= 63
    assert all(c.isascii() and (c.isalnum() or c in "._-") for c in label)
    assert label[0].isalnum()
    assert label[-1].isalnum()


def test_versions_are_read_as_servers_write_them() -> None:
    assert _version({"major": "1", "minor": "20"}) == (1, 20)
    assert _version({"major": "1", "minor": "27+"}) == (1, 27)
    assert _version({}) == (0, 0)


def test_manifests_of_the_deploy_folder_are_what_the_backend_uses() -> None:
    yaml = pytest.importorskip("yaml")
    folder = Path(__file__).parents[2] / "deploy" / "kubernetes"
    objects = [o for path in sorted(folder.glob("*.yaml")) for o in yaml.safe_load_all(path.read_text()) if o]
    by_kind = {(o["kind"], o["metadata"]["name"]): o for o in objects}
    made = manifest(wanted(placement=Placement(priority="agentrl")))
    policy = by_kind["NetworkPolicy", "agentrl-sandboxes"]["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= made["metadata"]["labels"].items()
    assert policy["egress"] == []
    assert ("PriorityClass", made["spec"]["priorityClassName"]) in by_kind
    gateway = by_kind["Deployment", "agentrl-gateway"]["spec"]["template"]["spec"]
    assert ("ServiceAccount", gateway["serviceAccountName"]) in by_kind
    rules = by_kind["Role", "agentrl-sandboxes"]["rules"]
    assert {r for rule in rules for r in rule["resources"]} == {"pods", "configmaps"}
    assert "*" not in json.dumps(rules)


# ------------------------------------------------------------------------------------------------ images


@pytest.mark.parametrize(
    ("dockerfile", "image", "files"),
    [
        (None, "base:1", True),
        ("# nothing\nFROM scratch\n", "base:1", True),
        ("FROM some/image:3\n", "some/image:3", False),
        ("FROM some/image:3\nRUN make\n", "agentrl/environment:", False),
    ],
)
def test_an_environment_folder_says_which_image_it_needs(
    tmp_path: Path, dockerfile: str | None, image: str, files: bool
) -> None:
    folder = tmp_path / "environment"
    folder.mkdir()
    (folder / "a.py").write_text("a = 1\n")
    if dockerfile is not None:
        (folder / "Dockerfile").write_text(dockerfile)

    async def no() -> bool:
        return False

    async def check() -> None:
        images = KubernetesImages(tmp_path / "state", base_image="base:1", shares_engine=no)
        digest = await images.prepare(str(folder))
        prepared = await images.require(digest)
        assert prepared.image.startswith(image)
        assert prepared.files is files
        again = KubernetesImages(tmp_path / "state", base_image="other:1", shares_engine=no)
        assert await again.require(digest) == prepared
        with pytest.raises(SandboxError) as caught:
            await again.require("dir:unknown")
        assert caught.value.code == "image_unknown"

    asyncio.run(check())


# ------------------------------------------------------------------------------------------------ the watch


class Server:
    """A cluster whose lists and watches are written down beforehand."""

    def __init__(self, lists: list[dict[str, str]], watches: list[list[Any]]) -> None:
        self.lists = lists
        self.watches = watches

    async def call(self, *_: Any, **__: Any) -> dict[str, Any]:
        now = self.lists.pop(0)
        items = [pod({"phase": phase}, name=name, resourceVersion="1") for name, phase in now.items()]
        return {"items": items, "metadata": {"resourceVersion": "1"}}

    async def watch(self, *_: Any, **__: Any) -> Any:
        for event in self.watches.pop(0) if self.watches else [asyncio.Event()]:
            if isinstance(event, Exception):
                raise event
            if isinstance(event, asyncio.Event):
                await event.wait()
            kind, name, phase = event
            yield {"type": kind, "object": pod({"phase": phase}, name=name, resourceVersion="2")}


def test_a_watch_that_lost_its_place_tells_what_happened_meanwhile() -> None:
    async def check() -> None:
        server = Server(
            [{"a": "Running", "b": "Running"}, {"a": "Failed"}],
            [[("MODIFIED", "a", "Running"), ("BOOKMARK", "", "")], [ApiUnknown("cut")], [Gone()]],
        )
        pods = Pods(server, "/pods", "x")  # type: ignore[arg-type]
        heard: dict[str, list[str | None]] = {"a": [], "b": []}
        for name, said in heard.items():
            pods.listen(name, lambda now, said=said: said.append(now and now["status"]["phase"]))
        pods.start()
        async with asyncio.timeout(10):
            while heard["b"][-1:] != [None]:
                await asyncio.sleep(0.01)
        assert heard == {"a": ["Running", "Running", "Failed"], "b": ["Running", None]}
        assert (pods.counts.lists, pods.counts.gone, pods.counts.cuts) == (2, 1, 1)
        assert pods.get("b") is None
        await pods.close()

    asyncio.run(check())


class Listed(Cluster):
    """A cluster that answers lists with bytes which were written before."""

    def __init__(self, pages: list[bytes]) -> None:
        super().__init__(server="http://nowhere")
        self.pages = pages

    async def _send(self, *_: Any) -> Any:
        return _Answer(self.pages.pop(0))


class _Answer:
    status = 200

    def __init__(self, data: bytes) -> None:
        self.read = lambda: _soon(data)

    async def __aenter__(self) -> _Answer:
        return self

    async def __aexit__(self, *_: object) -> None: ...


async def _soon(data: bytes) -> bytes:
    return data


def test_two_thousand_pods_are_listed_in_a_fifth_of_a_second_and_kept_without_what_nobody_reads() -> None:
    """CPU time of this process, the best of five: what else the machine does is not counted."""
    count = 2000
    pages = [page(at, PAGE, "more" if at + PAGE < count else "") for at in range(0, count, PAGE)]
    assert sum(map(len, pages)) / count > 6000, "as long as a real one"

    async def once() -> tuple[float, Pods]:
        pods = Pods(Listed(list(pages)), "/pods", "x")
        begun = time.process_time()
        await pods.look()
        return time.process_time() - begun, pods

    tries = [asyncio.run(once()) for _ in range(5)]
    pods = tries[-1][1]
    assert len(pods) == count
    known = pods.get("agentrl-0123456789ab-1999")
    assert known is not None
    assert known["metadata"]["annotations"]["agentrl/session"] == "run/group-1999/0"
    assert (known["spec"], known["status"]["podIP"]) == ({"nodeName": "node-1"}, "10.0.7.249")
    assert "managedFields" not in known["metadata"]
    assert min(seconds for seconds, _ in tries) < 0.2


def test_a_pod_that_is_gone_is_not_brought_back_by_an_answer_that_was_on_its_way() -> None:
    pods = Pods(Server([], []), "/pods", "x")  # type: ignore[arg-type]
    heard: list[str | None] = []
    pods.listen("a", lambda now: heard.append(now and now["metadata"]["uid"]))
    pods.note(pod({"phase": "Running"}, name="a", uid="1"))
    pods.gone("a", "1")
    pods.note(pod({"phase": "Running"}, name="a", uid="1"))
    assert pods.get("a") is None
    pods.note(pod({"phase": "Running"}, name="a", uid="2"))
    pods.gone("a", "1")
    assert pods.names() == ["a"]
    assert heard == ["1", None, "2"]


# ------------------------------------------------------------------------------------------------ the line


class Far:
    """A witness and an agent behind wires that break after so many bytes each. Counts what it ran."""

    def __init__(self, lives: list[int]) -> None:
        self.lives = lives
        """Bytes that each next connection carries, both ways together; without one left: no end."""
        self.ran: dict[str, int] = {}
        self.instance = "one"
        self.last: dict[str, Any] | None = {"over": True}
        """What it answers to its end; None: nothing."""

    async def dial(self, received: Received, dropped: Dropped) -> FarWire:
        return FarWire(self, received, dropped, self.lives.pop(0) if self.lives else 10**9)


class FarWire:
    def __init__(self, far: Far, received: Received, dropped: Dropped, life: int) -> None:
        self._far = far
        self._received = received
        self._dropped = dropped
        self._life = life
        self._inbox = Inbox()
        self._open = True

    def write(self, data: bytes) -> None:
        asyncio.get_running_loop().call_soon(self._arrive, data)

    def close(self) -> None:
        self._open = False

    def _arrive(self, data: bytes) -> None:
        for header, body in self._inbox.feed(self._carry(data)):
            if header.get("op") == "witness.hello":
                answer: dict[str, Any] = {"witness": self._far.instance}
            elif header.get("op") == "witness.end":
                if self._far.last is None:
                    continue
                answer = self._far.last
            else:
                # The far side runs a request once and answers the same each time: see `agent`.
                self._far.ran.setdefault(header["key"], len(body))
                answer = {"key": header["key"], "size": self._far.ran[header["key"]]}
            for piece in frames({**answer, "id": header["id"]}, body[::-1]):
                self._received(self._carry(piece))

    def _carry(self, data: bytes) -> bytes:
        if not self._open:
            return b""
        carried, self._life = data[: self._life], self._life - len(data)
        if self._life <= 0:
            self._open = False
            asyncio.get_running_loop().call_soon(self._dropped, "cut")
        return carried


class Nowhere:
    async def dial(self, received: Received, dropped: Dropped) -> FarWire:
        raise ConnectionRefusedError("nobody")


def line_to(far: Far | Nowhere, **options: Any) -> Line:
    async def nothing() -> None:
        return None

    async def post_mortem() -> dict[str, Any]:
        return {"seen": True}

    return Line("box", token="t", dial=far.dial, post_mortem=post_mortem, doubt=nothing, **options)


@given(st.lists(st.integers(1, 5000), max_size=6), st.lists(st.binary(max_size=3000), min_size=1, max_size=8))
@settings(max_examples=30, deadline=None)
def test_answers_are_whole_wherever_connections_are_cut(lives: list[int], bodies: list[bytes]) -> None:
    async def check() -> None:
        far = Far(list(lives))
        line = line_to(far)
        calls = (line.call({"op": "x", "key": str(i)}, b, deadline_s=20) for i, b in enumerate(bodies))
        for i, (header, body) in enumerate(await asyncio.gather(*calls)):
            assert (header["key"], header["size"], body) == (str(i), len(bodies[i]), bodies[i][::-1])
        assert far.ran == {str(i): len(body) for i, body in enumerate(bodies)}
        line.close()
        await line.finished()

    asyncio.run(check())


def test_a_line_with_nothing_to_say_has_no_connection() -> None:
    async def check() -> None:
        line = line_to(Far([]), idle_s=0.05)
        assert not line.connected
        await line.call({"op": "x", "key": "1"}, deadline_s=5)
        async with asyncio.timeout(5):
            while line.connected:
                await asyncio.sleep(0.02)
        await line.call({"op": "x", "key": "2"}, deadline_s=5)
        assert line.connections == 2
        line.close()
        await line.finished()

    asyncio.run(check())


@pytest.mark.parametrize(
    ("last", "talked", "over"),
    [({"over": True}, True, True), ({"over": False}, True, False), (None, True, False), (None, False, False)],
)
def test_a_line_that_is_closed_knows_whether_the_pod_said_that_it_is_over(
    last: dict[str, Any] | None, talked: bool, over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envs.sandbox.kubernetes_line.FAREWELL_S", 0.2)

    async def check() -> None:
        far = Far([])
        far.last = last
        line = line_to(far)
        if talked:
            await line.call({"op": "x", "key": "1"}, deadline_s=5)
        line.close()
        async with asyncio.timeout(5):
            assert await line.over() is over
        assert not line.connected
        await line.finished()

    asyncio.run(check())


def test_a_pod_whose_connection_is_cut_while_it_ends_is_not_known_to_be_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At once: nobody waits for the answer of a connection that is no more."""
    monkeypatch.setattr("envs.sandbox.kubernetes_line.FAREWELL_S", 60.0)

    async def check() -> None:
        size = len(b"".join(frames({"op": "witness.hello", "token": "t", "id": "hello"})))
        line = line_to(Far([size + 200]))
        await line.call({"op": "x", "key": "1"}, deadline_s=5)
        line.close()
        async with asyncio.timeout(5):
            assert await line.over() is False
        assert not line.connected
        await line.finished()

    asyncio.run(check())


def test_what_can_not_be_reached_is_unknown_in_time_and_lost_in_the_end() -> None:
    async def check() -> None:
        line = line_to(Nowhere(), unreachable_s=1.0)
        with pytest.raises(ExecUnknown):
            await line.call({"op": "x", "key": "1"}, deadline_s=0.1)
        with pytest.raises(SandboxLost) as caught:
            await line.call({"op": "x", "key": "1"}, deadline_s=20)
        assert caught.value.code == "unreachable"
        assert "nobody" in str(caught.value.evidence["cause"])
        line.close()
        await line.finished()

    asyncio.run(check())


def test_another_witness_behind_the_same_name_is_another_sandbox() -> None:
    async def check() -> None:
        far = Far([400])
        line = line_to(far)
        await line.call({"op": "x", "key": "1"}, deadline_s=5)
        far.instance = "two"
        with pytest.raises(SandboxLost) as caught:
            await line.call({"op": "x", "key": "2"}, b"x" * 500, deadline_s=20)
        assert caught.value.code == "replaced"
        line.close()
        await line.finished()

    asyncio.run(check())


# ------------------------------------------------------------------------------------------------ the server


@contextlib.contextmanager
def speechless(folder: Path) -> Iterator[str]:
    """A kubeconfig of a server that begins an answer, and then neither speaks nor hangs up."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    words = f"openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=localhost -keyout {key} -out {certificate}"
    subprocess.run(words, shell=True, check=True, capture_output=True, timeout=60)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"https://127.0.0.1:{listener.getsockname()[1]}"

        def serve() -> None:
            with contextlib.suppress(OSError):
                plain, _ = listener.accept()
                with context.wrap_socket(plain, server_side=True) as connection:
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                    over.wait(60)

        serving = threading.Thread(target=serve)
        serving.start()
        config = {
            "clusters": [{"name": "c", "cluster": {"server": address, "insecure-skip-tls-verify": True}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        (folder / "kubeconfig").write_text(json.dumps(config))
        try:
            yield str(folder / "kubeconfig")
        finally:
            over.set()
            serving.join(60)


def test_a_connection_that_was_given_up_is_closed_though_the_server_says_no_goodbye(tmp_path: Path) -> None:
    async def check(kubeconfig: str) -> None:
        cluster = Cluster(kubeconfig=kubeconfig)
        with pytest.raises(ApiUnknown):
            await cluster.call("GET", "/version", phase="test", deadline_s=2.0)
        await cluster.close()

    gc.collect()  # what tests before this one left is not its business
    with speechless(tmp_path) as kubeconfig, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(check(kubeconfig))
        gc.collect()
    assert [str(warning.message) for warning in caught if warning.category is ResourceWarning] == []


# ------------------------------------------------------------------------------------------------ the witness

TOKEN = "the token"


@pytest.fixture
def left() -> threading.Event:
    """Set when the witness behind the door ends its process."""
    return threading.Event()


@pytest.fixture
def door(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: threading.Event
) -> Iterator[tuple[str, socket.socket]]:
    """A witness's way of admitting guests, and the agent's end of its connection to the agent."""
    monkeypatch.setattr(witness, "RUN", str(tmp_path))
    monkeypatch.setattr(witness, "PROOF_S", 0.5)
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    one = witness.Witness({"token_sha256": digest, "lease_s": 60, "port": None, "workdir": str(tmp_path)})
    one._quit = lambda _: left.set()
    path = str(tmp_path / "door")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent_side,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
    ):
        agent_side.bind(str(tmp_path / "agent"))
        agent_side.listen(1)
        linked = threading.Thread(target=one._link.run, daemon=True)
        linked.start()
        agent, _ = agent_side.accept()
        agent.settimeout(10)
        listener.bind(path)
        listener.listen(64)
        listener.settimeout(0.05)
        over = threading.Event()

        def admit() -> None:
            while not over.is_set():
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                connection.settimeout(None)
                one._admit(connection)

        admitting = threading.Thread(target=admit, daemon=True)
        admitting.start()
        with agent:
            yield path, agent
        over.set()
        admitting.join(5)
        linked.join(5)
        if one._link._socket is not None:
            one._link._socket.close()


def knock(path: str, word: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(10)
    connection.connect(path)
    connection.sendall(word)
    return connection


def hello(token: str) -> bytes:
    return b"".join(frames({"op": "witness.hello", "token": token, "id": "hello"}))


def message(connection: socket.socket) -> dict[str, Any]:
    inbox = Inbox()
    while True:
        found = inbox.feed(connection.recv(65536))
        if found:
            return dict(found[0][0])


STRANGERS = (
    hello("another"),
    b"GET / HTTP/1.0\r\n\r\n",
    struct.pack(">II", 2, 0) + b"[]",
    struct.pack(">II", 1 << 30, 0),
    b"\xff" * 9000,
    b"",
)


def test_only_who_proves_itself_takes_the_place_of_the_guest(door: tuple[str, socket.socket]) -> None:
    path, _ = door
    with knock(path, hello(TOKEN)) as guest:
        assert message(guest)["witness"]
        for word in STRANGERS:
            with knock(path, word) as stranger:
                try:
                    said = stranger.recv(100)
                except ConnectionResetError:
                    said = b""
                assert said == b""
        guest.sendall(hello(TOKEN))
        assert message(guest)["witness"]
        with knock(path, hello(TOKEN)) as newer:
            assert message(newer)["witness"]
            assert guest.recv(100) == b""


def test_a_request_that_was_cut_off_is_closed_at_the_agent(door: tuple[str, socket.socket]) -> None:
    path, agent = door
    body = os.urandom(600_000)
    pieces = frames({"op": "exec", "id": 7}, body)
    inbox = Inbox()
    seen: list[Any] = []
    with knock(path, hello(TOKEN) + pieces[0]) as guest:
        message(guest)
        held = agent.recv(1 << 20)
    while not seen:
        seen = inbox.feed(held)
        held = b"" if seen else agent.recv(1 << 20)
    header, left = seen[0]
    assert (header["id"], header["op"]) == (7, "void")
    assert body.startswith(left)


def test_what_the_agent_says_goes_to_the_guest_of_the_moment(door: tuple[str, socket.socket]) -> None:
    path, agent = door
    with knock(path, hello(TOKEN)) as guest:
        message(guest)
        guest.sendall(b"".join(frames({"op": "probe", "id": 3})))
        assert message(agent) == {"op": "probe", "id": 3}
        agent.sendall(b"".join(frames({"id": 3, "processes": 0})))
        assert message(guest) == {"id": 3, "processes": 0}
        agent.shutdown(socket.SHUT_RDWR)
        assert message(guest)["event"] == "agent_gone"
        guest.sendall(b"".join(frames({"op": "probe", "id": 4})))
        assert message(guest)["error"]["kind"] == "agent_gone"


def test_a_witness_says_that_its_pod_is_over_when_the_agent_is_gone_and_then_goes(
    door: tuple[str, socket.socket], left: threading.Event
) -> None:
    path, agent = door
    with knock(path, hello(TOKEN)) as guest:
        message(guest)
        guest.sendall(b"".join(frames({"op": "witness.end", "id": 0})))
        assert message(agent)["op"] == "shutdown"
        agent.shutdown(socket.SHUT_RDWR)
        inbox, said = Inbox(), []
        while not any("over" in header for header in said):
            said += [header for header, _ in inbox.feed(guest.recv(65536))]
        assert said[-1] == {"over": True, "id": 0}
        assert not left.is_set()
    assert left.wait(0.9)  # its guest hung up: it waits no longer


def test_a_witness_whose_agent_does_not_end_says_so(
    door: tuple[str, socket.socket], left: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, agent = door
    monkeypatch.setattr(witness, "END_S", 0.1)
    monkeypatch.setattr(witness, "FAREWELL_S", 0.1)
    with knock(path, hello(TOKEN)) as guest:
        message(guest)
        guest.sendall(b"".join(frames({"op": "witness.end", "id": 0})))
        assert message(agent)["op"] == "shutdown"
        assert message(guest) == {"over": False, "id": 0}
        assert left.wait(5)  # though its guest stays
