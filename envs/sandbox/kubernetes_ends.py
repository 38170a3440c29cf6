"""A pod's status to what became of it: the kind of its end, whose fault it is, and whether trying again makes
sense. Pure functions of the JSON that the API server gives.

The owner is read from what the kubelet, the scheduler and the kernel recorded, never from output or an exit
code. `OOMKilled` in a status says nothing about a command (its own control group does, see `agent`): the
container that a status speaks of is the agent's, and an agent that was killed is the environment's fault.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import FaultOwner, SandboxError, SandboxLost
from agentrl.types import JsonScalar

SANDBOX, WITNESS = "sandbox", "witness"
"""Names of the two containers."""
_OWN_LIMIT = re.compile(
    r"exceed(s|ed) (the|its) .*(limit|total limit)|exceeds the limit|exceeded its local ephemeral", re.I
)
_NODE = frozenset({"NodeLost", "NodeShutdown", "Shutdown", "Terminated", "NodeAffinity"})
_DISRUPTIONS = {
    "PreemptionByScheduler": "preempted",
    "DeletionByTaintManager": "node_lost",
    "DeletionByPodGC": "node_lost",
    "EvictionByEvictionAPI": "evicted",
    "TerminationByKubelet": "evicted",
}
"""Reasons of the condition DisruptionTarget (Kubernetes 1.26 and later)."""
_IMAGE = frozenset(
    {
        *("ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull"),
        *("ImageInspectError", "RegistryUnavailable", "SignatureValidationFailed"),
    }
)
_MISSING = re.compile(
    "not found|manifest unknown|does not exist|access denied|InvalidImageName|couldn't parse|not present",
    re.I,
)
_STARTING = frozenset(
    {
        *("CreateContainerConfigError", "CreateContainerError", "RunContainerError"),
        *("PreCreateHookError", "PreStartHookError", "PostStartHookError", "CrashLoopBackOff"),
    }
)
_NO_PROGRAM = re.compile(r"executable file not found|no such file or directory", re.I)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """What became of a pod. `witness_lives`: its workdir can still be looked at."""

    code: str
    message: str
    fix: str = "Run the whole attempt again in a new sandbox."
    owner: FaultOwner = "environment"
    retryable: bool = True
    witness_lives: bool = False
    evidence: dict[str, JsonScalar] = field(default_factory=dict)

    def lost(self, name: str) -> SandboxLost:
        return SandboxLost(
            f"Sandbox {name} is gone: {self.message}.",
            fix=self.fix,
            owner=self.owner,
            code=self.code,
            retryable=self.retryable,
            evidence=self.evidence,
        )

    def failed(self, name: str, phase: str) -> SandboxError:
        return SandboxError(
            f"Sandbox {name} could not start: {self.message}.",
            fix=self.fix,
            owner=self.owner,
            code=self.code,
            phase=phase,
            retryable=self.retryable,
            evidence=self.evidence,
        )


DELETED = End(
    code="pod_deleted",
    message="its pod was deleted by someone else",
    fix="Find out who deletes pods of this namespace (`kubectl get events`), and run the attempt again.",
)


def ready(pod: dict[str, Any]) -> bool:
    """Both containers run, and the pod can be reached."""
    containers = _containers(pod)
    return (
        bool(pod["status"].get("podIP"))
        and len(containers) == 2
        and all("running" in c.get("state", {}) for c in containers.values())
    )


def ended(pod: dict[str, Any] | None) -> bool:
    """None of its containers runs, or will run again."""
    return pod is not None and pod["status"].get("phase") in ("Succeeded", "Failed")


def image_ids(pod: dict[str, Any]) -> set[str]:
    """What the nodes say that the containers were started from."""
    return {c["imageID"] for c in _containers(pod).values() if c.get("imageID")}


def unschedulable(pod: dict[str, Any]) -> str | None:
    """Why no node takes the pod; None when one does, or nobody has looked yet."""
    for condition in pod["status"].get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable":
            return str(condition.get("message") or "no node fits")
    return None


def end_of(pod: dict[str, Any]) -> End | None:
    """What became of a pod that ran or was starting; None while it may still run."""
    status = pod["status"]
    facts = _facts(pod)
    reason, message = str(status.get("reason") or ""), str(status.get("message") or "")
    for condition in status.get("conditions") or ():
        if condition["type"] == "DisruptionTarget" and condition.get("status") == "True":
            code = _DISRUPTIONS.get(str(condition.get("reason")), "disrupted")
            if code != "evicted" or not _OWN_LIMIT.search(message):
                words = condition.get("message") or condition.get("reason")
                return End(code=code, message=f"the cluster took its pod away ({words})", evidence=facts)
    if reason == "Evicted":
        return _eviction(message, facts)
    if reason == "Preempting":
        return End(
            code="preempted", message=f"a more important pod took its place ({message})", evidence=facts
        )
    if reason == "DeadlineExceeded":
        return End(
            code="pod_deadline",
            message="it lived longer than any sandbox may",
            fix="Set shorter limits for the task, or a longer `max_life_s` for the backend.",
            retryable=False,
            evidence=facts,
        )
    if reason in _NODE or status.get("phase") == "Unknown":
        return End(
            code="node_lost", message=f"its node is lost or shuts down ({reason} {message})", evidence=facts
        )
    if reason in (
        "UnexpectedAdmissionError",
        "OutOfmemory",
        "OutOfcpu",
        "OutOfpods",
        "OutOfephemeral-storage",
    ):
        return End(code="node_full", message=f"its node refused it ({reason}: {message})", evidence=facts)
    if pod["metadata"].get("deletionTimestamp"):
        return End(code=DELETED.code, message=DELETED.message, fix=DELETED.fix, evidence=facts)
    return _container_end(pod, facts)


def start_problem(pod: dict[str, Any]) -> End | None:
    """Why a pod that is starting will not; None while it may. Everything that `end_of` knows, too."""
    ended = end_of(pod)
    if ended is not None:
        return ended
    facts = _facts(pod)
    for name, container in _containers(pod).items():
        waiting = container.get("state", {}).get("waiting") or {}
        reason, message = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
        if reason in _IMAGE:
            return _image_problem(container, reason, message, facts)
        if reason in _STARTING:
            return _start_refused(name, reason, message, facts)
    return None


def _eviction(message: str, facts: dict[str, JsonScalar]) -> End:
    if _OWN_LIMIT.search(message):
        mine = f"container {WITNESS}" in message.lower() or '"place"' in message
        return End(
            code="disk_quota",
            message=f"it was evicted for more disk than its limit ({message})",
            fix="Raise the task's disk limit."
            if not mine
            else "Raise the size of what is laid into the pod.",
            owner="environment" if mine else "policy",
            retryable=False,
            evidence=facts,
        )
    return End(code="evicted", message=f"its node evicted it ({message})", evidence=facts)


def _container_end(pod: dict[str, Any], facts: dict[str, JsonScalar]) -> End | None:
    ended = {
        name: container["state"]["terminated"]
        for name, container in _containers(pod).items()
        if "terminated" in container.get("state", {})
    }
    if WITNESS in ended:
        return _witness_end(ended, facts)
    if SANDBOX in ended:
        how = ended[SANDBOX]
        reason = str(how.get("reason") or "")
        if reason in ("ContainerCannotRun", "StartError"):
            return _start_refused(SANDBOX, reason, str(how.get("message") or ""), facts)
        return End(
            code="agent_died",
            message=f"its agent ended ({reason or 'exit'} {how.get('exitCode')})",
            witness_lives=True,
            evidence=facts,
        )
    if pod["status"].get("phase") in ("Failed", "Succeeded"):
        return End(code="pod_ended", message=f"its pod {pod['status']['phase'].lower()}", evidence=facts)
    return None


def _witness_end(ended: dict[str, Any], facts: dict[str, JsonScalar]) -> End:
    how = ended[WITNESS]
    words = str(how.get("message") or "").strip()
    if how.get("reason") in ("ContainerCannotRun", "StartError"):
        return _start_refused(WITNESS, str(how["reason"]), words, facts)
    if '"no_fence"' in words:
        return End(
            code="no_fence",
            message=f"its network could not be closed ({words})",
            fix="Use nodes with Linux 4.17 or newer, or, where the cluster enforces NetworkPolicy, set "
            "AGENTRL_KUBERNETES_FENCE=policy.",
            retryable=False,
            evidence=facts,
        )
    if '"no_disk_limit"' in words:
        return End(
            code="no_disk_limit",
            message=f"its disk could not be limited ({words})",
            fix="Use Kubernetes 1.22 or newer, where memory-backed volumes have a size.",
            retryable=False,
            evidence=facts,
        )
    if how.get("exitCode") == 0:
        return End(
            code="lease_over", message="nobody asked it anything for the time of its lease", evidence=facts
        )
    said = f"{how.get('reason')} {how.get('exitCode')} {words[-300:]}"
    return End(code="witness_died", message=f"its witness ended ({said})", evidence=facts)


def _image_problem(
    container: dict[str, Any], reason: str, message: str, facts: dict[str, JsonScalar]
) -> End | None:
    """A first failed pull may pass; one that the kubelet has begun to wait for has failed before."""
    image = container.get("image")
    missing = bool(_MISSING.search(f"{reason} {message}"))
    if reason == "ErrImagePull" and not missing:
        return None
    return End(
        code="image_missing" if missing else "image_pull",
        message=f"the cluster can not pull the image {image} ({reason}: {message})",
        fix="Build an image with python3 >= 3.8 and bash, push it where the cluster can pull it or load it"
        " into its nodes (deploy/kubernetes/README.md says how), and name it in AGENTRL_KUBERNETES_IMAGE.",
        retryable=not missing,
        evidence={**facts, "image": str(image)},
    )


def _start_refused(name: str, reason: str, message: str, facts: dict[str, JsonScalar]) -> End:
    no_program = bool(_NO_PROGRAM.search(message))
    return End(
        code="no_python" if no_program else "start_refused",
        message=f"its container {name} does not start ({reason}: {message})",
        fix="Use an image with python3 >= 3.8 and bash." if no_program else "See the kubelet's message.",
        owner="task" if no_program else "environment",
        retryable=not no_program,
        evidence=facts,
    )


def _containers(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {c["name"]: c for c in pod["status"].get("containerStatuses") or ()}


def _facts(pod: dict[str, Any]) -> dict[str, JsonScalar]:
    """The evidence that a fault carries."""
    status = pod["status"]
    facts: dict[str, JsonScalar] = {
        "pod": pod["metadata"]["name"],
        "uid": pod["metadata"].get("uid"),
        "phase": status.get("phase"),
        "reason": status.get("reason"),
        "message": status.get("message"),
        "node": pod.get("spec", {}).get("nodeName"),
    }
    for name, container in _containers(pod).items():
        for state, how in container.get("state", {}).items():
            facts[name] = state
            if state == "terminated":
                facts[f"{name}_exit"] = how.get("exitCode")
                facts[f"{name}_reason"] = how.get("reason")
    return facts
