"""Requests that are refused: a status and a body that says what to do next."""

from __future__ import annotations

from agentrl.errors import BoundaryError
from agentrl.types import Fault
from harness.gateway.wire import ErrorBody


class Refused(Exception):
    """An answer that is not a success. Nothing has changed when it is raised."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        fix: str,
        owner: str = "caller",
        phase: str = "request",
        retryable: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.body = ErrorBody.model_validate(
            {
                "code": code,
                "owner": owner,
                "message": message,
                "fix": fix,
                "phase": phase,
                "retryable": retryable,
            }
        )


def key_reused(client_key: str) -> Refused:
    """The key of one request, sent with another body."""
    return Refused(
        409,
        "client_key_reused",
        f"client_key {client_key} was used for another request.",
        fix="Use a new key for a new request, or send the same body.",
    )


def of_fault(fault: Fault) -> ErrorBody:
    """A fault as an answer: its owner was decided where the evidence was."""
    return ErrorBody(
        code=fault.code,
        owner=fault.owner,
        message=fault.message,
        fix="The session is over: finalize it to get its verdict, then open another."
        if fault.retryable
        else "Finalize the session to get its verdict; trying again will not help.",
        phase=fault.phase,
        retryable=fault.retryable,
        evidence=dict(fault.evidence),
    )


def of_boundary(error: BoundaryError) -> ErrorBody:
    """A boundary error as an answer."""
    return ErrorBody(
        code=error.code,
        owner=error.owner,
        message=error.message,
        fix=error.fix,
        phase=error.phase,
        retryable=error.retryable,
        evidence=dict(error.evidence),
    )


class Over(Exception):
    """The session has ended with this fault (or with a reward: None) and can not do what was asked."""

    def __init__(self, state: str, fault: Fault | None) -> None:
        super().__init__(state)
        self.state = state
        self.fault = fault
