"""What the cluster is asked to run for one sandbox: one bare pod of two containers from the task's image.

`sandbox` holds the agent and the policy's commands; `witness` (see `kubernetes_witness`) the pod's door.
Both: read-only system, no service account, no service links, all capabilities dropped but those named here,
no privilege escalation, the runtime's seccomp profile (and ours for the policy). Memory and disk are asked
for as they are limited, so that a sandbox which keeps its limits is never the first to be evicted; CPU is
limited but hardly asked for: an idle sandbox needs none, and commands are rationed by run permits.

The policy's user id is another one in every pod, because the limit on processes counts a user's processes of
the whole node.
"""

from __future__ import annotations

import base64
import json
import os
import platform
import re
from dataclasses import dataclass, field
from typing import Any

from agentrl.config import environment
from agentrl.errors import ConfigError
from agentrl.types import SandboxSpec
from envs.sandbox import namespaces as ns
from envs.sandbox.cgroups import RESERVED_MEMORY_MIB
from envs.sandbox.contract import checked_multiplier
from envs.sandbox.kubernetes_ends import SANDBOX, WITNESS

LABEL = "agentrl"
BASE = "/opt/agentrl"
TOOLS = f"{BASE}/tools"
HOME = "/home/policy"
PORT = 8477
"""Where a witness listens, when it is reached over the pod network."""
WITNESS_MEMORY_MIB = 96
WITNESS_CPU = "5m"
POLICY_CPU = 0.02
"""Cores asked for by a sandbox, whatever it is limited to."""
FIRST_POLICY_ID, POLICY_IDS = 2_000_000, 1_000_000_000
LOG_MIB = 32
"""Of node disk, for what a container may say to its log."""
RUN_MIB = 16
OPEN_FILES = 4096
AGENT_GRACE_S = 15.0
"""Between the end of a witness and that of its agent."""
SIZED_SINCE = (1, 22)
"""Kubernetes versions from which memory-backed volumes have the size that they are given."""
_AGENT_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP")
_WITNESS_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETPCAP")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where and how pods are made: what an operator decides, not a task."""

    namespace: str | None = None
    """None: that of the service account or of the kubeconfig's context."""
    reach: str = "auto"
    """`pod`: TCP to the pod's address; `exec`: through the API server; `auto`: `pod` from inside the
    cluster, else `exec`."""
    fence: str = "pod"
    """`pod`: the witness closes the pod's network (needs NET_ADMIN while it prepares); `policy`: the cluster
    enforces a NetworkPolicy, and verdicts do not claim that the kernel holds the network closed."""
    priority: str | None = None
    """Prefix of the PriorityClasses `<prefix>-verifier`, `<prefix>-live` and `<prefix>-warm`; None: the
    cluster's default."""
    runtime_class: str | None = None
    time_multiplier: float = 1.0
    """How many times longer things may take under it: see `contract.Slower`."""
    pull_secret: str | None = None

    @classmethod
    def from_environment(cls) -> Placement:
        """From `AGENTRL_KUBERNETES_*`. Raises `ConfigError` for words that mean nothing."""
        made = cls(
            namespace=environment("KUBERNETES_NAMESPACE"),
            reach=environment("KUBERNETES_REACH") or "auto",
            fence=environment("KUBERNETES_FENCE") or "pod",
            priority=environment("KUBERNETES_PRIORITY"),
            runtime_class=environment("KUBERNETES_RUNTIME_CLASS"),
            time_multiplier=checked_multiplier(
                environment("KUBERNETES_TIME_MULTIPLIER"), "AGENTRL_KUBERNETES_TIME_MULTIPLIER"
            ),
            pull_secret=environment("KUBERNETES_PULL_SECRET"),
        )
        for name, value, known in (
            ("REACH", made.reach, ("auto", "pod", "exec")),
            ("FENCE", made.fence, ("pod", "policy")),
        ):
            if value not in known:
                raise ConfigError(
                    f"AGENTRL_KUBERNETES_{name} = '{value}' is not known.", fix=f"Use {', '.join(known)}."
                )
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One pod, as the backend knows it."""

    name: str
    image: str
    spec: SandboxSpec
    labels: dict[str, str]
    annotations: dict[str, str]
    owner: dict[str, str]
    """Name and uid of the ConfigMap that holds the tools; deleting it deletes its pods."""
    token_sha256: str
    lease_s: float
    max_life_s: float
    mounts: tuple[str, ...] = ()
    """Targets of read-only folders."""
    waits: bool = False
    """It is started before anyone asks for it. The class of a pod can not be changed: it stays when somebody
    does."""
    place_mib: int = 64
    """Of node disk, for what is laid into the pod."""
    by_network: bool = False
    sized: bool = True
    """Whether the cluster gives memory-backed volumes their size."""
    placement: Placement = field(default_factory=Placement)


def policy_id() -> int:
    return FIRST_POLICY_ID + int.from_bytes(os.urandom(8), "big") % POLICY_IDS


def manifest(wanted: Wanted) -> dict[str, Any]:
    """The pod's object."""
    spec, placement = wanted.spec, wanted.placement
    uid = policy_id()
    disk = {spec.workdir: "work", "/tmp": "tmp", "/var/tmp": "var-tmp", "/dev/shm": "shm", "/logs": "logs"}
    disk[HOME] = "home"
    shared = [_mount("tools", TOOLS, read_only=True), _mount("run", f"{BASE}/run")]
    memory = spec.memory_mib + spec.disk_mib + RESERVED_MEMORY_MIB
    witness_disk = wanted.place_mib + LOG_MIB
    sandbox = {
        "name": SANDBOX,
        "image": wanted.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-I", "-S", f"{TOOLS}/kubernetes_witness.py", "agent"],
        "workingDir": "/",
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": _security(_AGENT_CAPABILITIES),
        "resources": _resources(
            f"{max(1, round(min(spec.cpus, POLICY_CPU) * 1000))}m", spec.cpus, memory, LOG_MIB
        ),
        "volumeMounts": [
            *shared,
            *(_mount("disk", target, sub) for target, sub in disk.items()),
            *(_mount("place", path, f"mount-{i}", read_only=True) for i, path in enumerate(wanted.mounts)),
        ],
    }
    extra: tuple[str, ...] = ("NET_ADMIN",) if placement.fence == "pod" else ()
    extra += () if wanted.sized else ("SYS_ADMIN",)
    witness = {
        "name": WITNESS,
        "image": wanted.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-I", "-S", f"{TOOLS}/kubernetes_witness.py", "witness"],
        "workingDir": "/",
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "env": [{"name": "AGENTRL_POD", "value": json.dumps(_facts(wanted, uid))}],
        "securityContext": _security((*_WITNESS_CAPABILITIES, *extra)),
        "resources": _resources(WITNESS_CPU, 1, WITNESS_MEMORY_MIB + RUN_MIB, witness_disk),
        "volumeMounts": [*shared, _mount("disk", f"{BASE}/disk"), _mount("place", f"{BASE}/place")],
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": int(wanted.max_life_s),
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostname": "sandbox",
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["127.0.0.1"]},
        "nodeSelector": {
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": _ARCHITECTURES.get(platform.machine(), platform.machine()),
        },
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [witness, sandbox],
        "volumes": [
            {"name": "tools", "configMap": {"name": wanted.owner["name"]}},
            _memory("run", RUN_MIB),
            _memory("disk", spec.disk_mib if wanted.sized else spec.disk_mib + RUN_MIB),
            {"name": "place", "emptyDir": {"sizeLimit": f"{wanted.place_mib}Mi"}},
        ],
    }
    if placement.priority is not None:
        kind = "warm" if wanted.waits else "verifier" if wanted.mounts else "live"
        pod["priorityClassName"] = f"{placement.priority}-{kind}"
    if placement.runtime_class is not None:
        pod["runtimeClassName"] = placement.runtime_class
    if placement.pull_secret is not None:
        pod["imagePullSecrets"] = [{"name": placement.pull_secret}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": wanted.name,
            "labels": wanted.labels,
            "annotations": wanted.annotations,
            "ownerReferences": [{"apiVersion": "v1", "kind": "ConfigMap", **wanted.owner}],
        },
        "spec": pod,
    }


def _facts(wanted: Wanted, uid: int) -> dict[str, Any]:
    """What the witness is told. Nothing in it is a secret: the token is only known by its hash."""
    spec = wanted.spec
    return {
        "token_sha256": wanted.token_sha256,
        "lease_s": wanted.lease_s,
        "port": PORT if wanted.by_network else None,
        "fence": wanted.placement.fence == "pod",
        "uid": uid,
        "workdir": spec.workdir,
        "disk_mib": spec.disk_mib,
        "mounts": len(wanted.mounts),
        "start": {
            "owner": 0,
            "filter": base64.b64encode(ns.seccomp_code()).decode(),
            "settings": {
                "workdir": spec.workdir,
                "home": HOME,
                "path": _PATH,
                "env": spec.env,
                "policy_uid": uid,
                "oom_path": "auto",
                "orphan_grace_s": AGENT_GRACE_S,
                "rlimits": {
                    "NOFILE": OPEN_FILES,
                    "CORE": 0,
                    "FSIZE": spec.disk_mib << 20,
                    "NPROC": spec.pids,
                },
            },
        },
    }


def _security(capabilities: tuple[str, ...]) -> dict[str, Any]:
    return {
        "runAsUser": 0,
        "runAsGroup": 0,
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "capabilities": {"drop": ["ALL"], "add": list(capabilities)},
    }


def _resources(cpu_asked: str, cpu_limit: float, memory_mib: int, disk_mib: int) -> dict[str, Any]:
    held = {"memory": f"{memory_mib}Mi", "ephemeral-storage": f"{disk_mib}Mi"}
    limit = f"{max(1, round(cpu_limit * 1000))}m"
    return {"requests": {"cpu": cpu_asked, **held}, "limits": {"cpu": limit, **held}}


def _mount(volume: str, path: str, sub_path: str | None = None, *, read_only: bool = False) -> dict[str, Any]:
    mount: dict[str, Any] = {"name": volume, "mountPath": path, "readOnly": read_only}
    return mount if sub_path is None else {**mount, "subPath": sub_path}


def _memory(name: str, mib: int) -> dict[str, Any]:
    return {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": f"{mib}Mi"}}


# ------------------------------------------------------------------------------ what the cluster made of it

_KEPT = ("restartPolicy", "automountServiceAccountToken", "activeDeadlineSeconds", "dnsPolicy")
_NEVER = ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace")
_HELD = ("privileged", "allowPrivilegeEscalation", "readOnlyRootFilesystem", "runAsUser", "capabilities")
_QUANTITY = re.compile(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)([numkMGTPE]?|[KMGTPE]i)")
_UNITS = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3}
_UNITS |= {letter: 1e3 ** (at + 2) for at, letter in enumerate("MGTPE")}
_UNITS |= {f"{letter}i": 1024.0 ** (at + 1) for at, letter in enumerate("KMGTPE")}


def quantity(text: str) -> float:
    """A quantity as Kubernetes writes them. Raises ValueError."""
    found = _QUANTITY.fullmatch(str(text))
    if found is None:
        raise ValueError(f"{text!r} is no quantity")
    return float(found.group(1)) * _UNITS[found.group(2)]


def altered(asked: dict[str, Any], made: dict[str, Any]) -> str | None:
    """What somebody between us and the cluster (an admission webhook, a LimitRange) changed of a pod that a
    sandbox can not do with; None: nothing. Another image name is none of it: images are told by their ids."""
    want, have = asked["spec"], made["spec"]
    for key in _KEPT:
        if key in want and have.get(key) != want[key]:
            return f"{key} is {have.get(key)!r}, not {want[key]!r}"
    for key in _NEVER:
        if have.get(key):
            return f"{key} is set"
    wanted = {container["name"]: container for container in want["containers"]}
    found = {container["name"]: container for container in have.get("containers") or ()}
    others = sorted({*found, *(c["name"] for c in have.get("initContainers") or ())} - set(wanted))
    if others or set(found) != set(wanted):
        return f"its containers are {', '.join(sorted({*found, *others}))}"
    for name, container in wanted.items():
        for key in _HELD:
            now = (found[name].get("securityContext") or {}).get(key)
            if now != container["securityContext"].get(key):
                return f"{key} of its container {name} is {now!r}"
        if found[name].get("command") != container["command"]:
            return f"the command of its container {name} is another"
        limits = (found[name].get("resources") or {}).get("limits") or {}
        for key, amount in container["resources"]["limits"].items():
            if key in limits and quantity(limits[key]) < quantity(amount):
                return f"the limit of {key} of its container {name} is {limits[key]}, not {amount}"
    return None


def loosened(asked: dict[str, Any], made: dict[str, Any]) -> frozenset[str]:
    """Limits, by the names of `SandboxInfo.limits_enforced`, that the cluster made wider or left out: the
    kernel does not hold what the task says, and nobody may claim that it does."""
    found = {container["name"]: container for container in made["spec"]["containers"]}
    names = {"memory": "memory", "cpu": "cpu", "ephemeral-storage": "disk"}
    wider = set()
    for container in asked["spec"]["containers"]:
        limits = (found[container["name"]].get("resources") or {}).get("limits") or {}
        for key, amount in container["resources"]["limits"].items():
            if key not in limits or quantity(limits[key]) > quantity(amount):
                wider.add(names[key])
    return frozenset(wider)
