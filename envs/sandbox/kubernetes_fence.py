"""Close a pod's network from inside: routing rules by which nothing but the answers of one TCP port leave.

Works whether or not the cluster enforces NetworkPolicy: the kernel has no route for anything else, of any
user, so a connect ends at once with ENETUNREACH; loopback stays. Needs CAP_NET_ADMIN, once, before the policy
has a process. Standard library only, Python >= 3.8: it runs inside the pod.

The rules are three: the kernel's own table of local addresses (there already, first), packets from our port
by the main table, everything else unreachable. See ip-rule(8); linux/fib_rules.h has the numbers.
"""

from __future__ import annotations

import errno
import os
import socket
import struct

_NEWRULE, _ERROR = 32, 2
_REQUEST, _ACK, _EXCL, _CREATE = 0x1, 0x4, 0x200, 0x400
_PRIORITY, _TABLE, _IP_PROTO, _SPORT_RANGE = 6, 15, 22, 23
_TO_TABLE, _UNREACHABLE = 1, 7
_MAIN = 254
_OURS, _REST = 10, 20
"""Priorities: after the local table (0), before the main one (32766)."""
_NOWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses for documentation (RFC 5737, RFC 3849): used to ask for a route, never sent to."""


def close_network(port: int | None) -> None:
    """Add the rules, for `port` if there is one, and see that they hold. Raises OSError naming the step."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            if port is not None:
                ours = _attribute(_IP_PROTO, bytes([socket.IPPROTO_TCP]))
                ours += _attribute(_SPORT_RANGE, struct.pack("=HH", port, port))
                ours += _attribute(_TABLE, struct.pack("=I", _MAIN))
                _add(family, _TO_TABLE, _MAIN, _OURS, ours)
            _add(family, _UNREACHABLE, 0, _REST, b"")
        except OSError as error:
            if family != socket.AF_INET6 or error.errno not in (errno.EAFNOSUPPORT, errno.EOPNOTSUPP):
                raise
    for family, address in _NOWHERE:
        _see_closed(family, address)


def _see_closed(family: int, address: str) -> None:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
    except OSError as error:
        if error.errno in (errno.ENETUNREACH, errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            return
        raise
    raise OSError(errno.EPERM, "there is still a route to the outside", f"rule {address}")


def _attribute(kind: int, value: bytes) -> bytes:
    size = 4 + len(value)
    return struct.pack("=HH", size, kind) + value + bytes(-size % 4)


def _add(family: int, action: int, table: int, priority: int, attributes: bytes) -> None:
    rule = struct.pack("=BBBBBBBBI", family, 0, 0, 0, table, 0, 0, action, 0)
    body = rule + _attribute(_PRIORITY, struct.pack("=I", priority)) + attributes
    head = struct.pack("=IHHII", 16 + len(body), _NEWRULE, _REQUEST | _ACK | _CREATE | _EXCL, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as link:
        link.settimeout(5)
        link.bind((0, 0))
        link.send(head + body)
        answer = link.recv(4096)
    _, kind, _, _, _ = struct.unpack_from("=IHHII", answer)
    code = -struct.unpack_from("=i", answer, 16)[0] if kind == _ERROR else errno.EPROTO
    if code not in (0, errno.EEXIST):
        raise OSError(code, os.strerror(code), f"routing rule, family {family}")
