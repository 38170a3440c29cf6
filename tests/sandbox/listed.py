"""A list of pods as an API server writes it: with everything that others read and the backend does not."""

from __future__ import annotations

import json
from typing import Any

from agentrl.types import SandboxSpec, to_json
from envs.sandbox.kubernetes_pod import Wanted, manifest

NOW = "2026-01-01T00:00:00Z"


def wanted(**changes: Any) -> Wanted:
    given = {
        "name": "agentrl-a-1",
        "image": "some/image:1",
        "spec": SandboxSpec(image="dir:x", cpus=2.0, memory_mib=100, disk_mib=20, pids=9),
        "labels": {"agentrl": "sandbox"},
        "annotations": {},
        "owner": {"name": "agentrl-a", "uid": "1"},
        "token_sha256": "00",
        "lease_s": 60.0,
        "max_life_s": 3600.0,
        "mounts": ("/tests",),
    }
    return Wanted(**{**given, **changes})


def full_pod(number: int) -> dict[str, Any]:
    """A running pod of the backend's own, as the server gives it back: defaults, owners of fields, status."""
    spec = SandboxSpec(image="dir:" + 64 * "a", cpus=2.0, memory_mib=1024, disk_mib=256, pids=128)
    said = {f"agentrl/{k}": v for k, v in (("session", f"run/group-{number}/0"), ("image", spec.image))}
    pod = manifest(
        wanted(
            name=f"agentrl-0123456789ab-{number}",
            spec=spec,
            labels={"agentrl": "sandbox", "agentrl.backend": "0123456789ab", "agentrl.session": f"s{number}"},
            annotations={**said, "agentrl/spec": to_json(spec).decode(), "agentrl/limits": "memory,pids,cpu"},
            token_sha256=64 * "0",
        )
    )
    fields = {
        f'f:{{"name":"{name}"}}': {".": {}, **{f"f:{key}": {} for key in pod["spec"]["containers"][0]}}
        for name in ("sandbox", "witness")
    }
    pod["metadata"] |= {
        "namespace": "agentrl",
        "uid": f"00000000-0000-0000-0000-{number:012d}",
        "resourceVersion": str(100_000 + number),
        "creationTimestamp": NOW,
        "managedFields": [
            {
                "manager": manager,
                "operation": "Update",
                "apiVersion": "v1",
                "time": NOW,
                "fieldsType": "FieldsV1",
                "fieldsV1": {"f:spec": {"f:containers": fields}},
                "subresource": "status",
            }
            for manager in ("agentrl", "kubelet")
        ],
    }
    pod["spec"] |= {"nodeName": "node-1", "serviceAccountName": "default", "tolerations": []}
    pod["status"] = {
        "phase": "Running",
        "podIP": f"10.0.{number // 250}.{number % 250}",
        "hostIP": "192.168.0.1",
        "startTime": NOW,
        "qosClass": "Burstable",
        "conditions": [
            {"type": kind, "status": "True", "lastProbeTime": None, "lastTransitionTime": NOW}
            for kind in ("Initialized", "Ready", "ContainersReady", "PodScheduled")
        ],
        "containerStatuses": [
            {
                "name": name,
                "image": "some/image:1",
                "imageID": "some/image@sha256:" + 64 * "b",
                "containerID": "containerd://" + 64 * "c",
                "ready": True,
                "started": True,
                "restartCount": 0,
                "lastState": {},
                "state": {"running": {"startedAt": NOW}},
            }
            for name in ("sandbox", "witness")
        ],
    }
    return pod


def page(first: int, count: int, more: str = "") -> bytes:
    """One answer to a list, as bytes of the wire."""
    metadata = {"resourceVersion": "200000", **({"continue": more} if more else {})}
    pods = [full_pod(number) for number in range(first, first + count)]
    listed = {"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": pods}
    return json.dumps(listed, separators=(",", ":")).encode()
