"""Linux isolation primitives by system call: namespaces, mounts, id maps, seccomp. Standard library only.

Each function is one primitive and raises `OSError` with the primitive's name as `filename`, so that a
refusal of the kernel can be named to the user. Nothing here decides anything; `zygote` puts them together.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import socket
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
_CLONE_NEWTIME = 0x00000080
_ALL_NEW = (
    CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
)

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, _PR_SET_NO_NEW_PRIVS = 22, 2, 38

CAP_SYS_ADMIN = 21

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, name: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), name)


def unshare(flags: int, name: str) -> None:
    _checked(_libc.unshare(flags), name)


def mount(
    source: str, target: str, kind: str | None = None, flags: int = 0, data: str = "", *, name: str = ""
) -> None:
    _checked(
        _libc.mount(
            os.fsencode(source),
            os.fsencode(target),
            None if kind is None else kind.encode(),
            ctypes.c_ulong(flags),
            os.fsencode(data) if data else None,
        ),
        name or f"mount {kind or 'bind'} {target}",
    )


def unmount(target: str) -> None:
    _checked(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def bind(source: str, target: str, attributes: int) -> None:
    """Bind a tree and everything mounted below it, with these attributes on all of it."""
    mount(source, target, None, MS_BIND | MS_REC)
    if attributes:
        restrict(target, attributes, _AT_RECURSIVE)


def restrict(target: str, attributes: int, flags: int = 0) -> None:
    """Give a mount these attributes."""
    request = struct.pack("=QQQQ", attributes, 0, 0, 0)
    number = _NUMBERS["mount_setattr"]
    _checked(
        _libc.syscall(
            ctypes.c_long(number),
            ctypes.c_int(_AT_FDCWD),
            os.fsencode(target),
            ctypes.c_uint(flags),
            request,
            ctypes.c_size_t(len(request)),
        ),
        f"mount_setattr {target}",
    )


def enter_root(root: str) -> None:
    """Make `root` (a mount point) the root of this mount namespace, and let go of the old one."""
    os.chdir(root)
    _checked(_libc.syscall(ctypes.c_long(_NUMBERS["pivot_root"]), b".", b"."), "pivot_root")
    unmount(".")
    os.chdir("/")


def loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as control:
        try:
            fcntl.ioctl(
                control, 0x8914, struct.pack("16sH14x", b"lo", 0x1 | 0x40)
            )  # SIOCSIFFLAGS: UP, RUNNING
        except OSError as error:
            raise OSError(error.errno, error.strerror, "loopback up") from None


def has_capability(number: int) -> bool:
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> number & 1)
    return False


def maps_range(first: int, count: int) -> bool:
    """Whether this user namespace maps the ids `first` to `first + count - 1`."""
    with open("/proc/self/uid_map", encoding="ascii") as file:
        for line in file:
            inside, _, length = (int(word) for word in line.split())
            if inside <= first and first + count <= inside + length:
                return True
    return False


def drop_all_capabilities() -> None:
    """Out of the bounding set too, so that no exec in this tree ever has one again."""
    for capability in range(64):
        if _libc.prctl(24, capability, 0, 0, 0) != 0:
            break
    header = struct.pack("=Ii", 0x20080522, 0)
    _checked(_libc.capset(header, struct.pack("=6I", *[0] * 6)), "capset")


# ---------------------------------------------------------------------------------------------------- seccomp

_X86 = {
    "ptrace": 101, "syslog": 103, "uselib": 134, "vhangup": 153, "modify_ldt": 154, "pivot_root": 155,
    "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168,
    "reboot": 169, "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173, "create_module": 174,
    "init_module": 175, "delete_module": 176, "quotactl": 179, "lookup_dcookie": 212, "clock_settime": 227,
    "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "perf_event_open": 298,
    "fanotify_init": 300, "name_to_handle_at": 303, "open_by_handle_at": 304, "clock_adjtime": 305,
    "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313,
    "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
    "clone": 56, "unshare": 272, "socket": 41,
}  # fmt: skip
_ARM = {
    "lookup_dcookie": 18, "umount2": 39, "mount": 40, "pivot_root": 41, "vhangup": 58, "quotactl": 60,
    "acct": 89, "kexec_load": 104, "init_module": 105, "delete_module": 106, "clock_settime": 112,
    "syslog": 116, "ptrace": 117, "reboot": 142, "sethostname": 161, "setdomainname": 162,
    "settimeofday": 170, "add_key": 217, "request_key": 218, "keyctl": 219, "swapon": 224, "swapoff": 225,
    "perf_event_open": 241, "fanotify_init": 262, "name_to_handle_at": 264, "open_by_handle_at": 265,
    "clock_adjtime": 266, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
    "finit_module": 273, "bpf": 280, "userfaultfd": 282, "kexec_file_load": 294,
    "clone": 220, "unshare": 97, "socket": 198,
}  # fmt: skip
_COMMON = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "clone3": 435,
    "pidfd_getfd": 438, "mount_setattr": 442, "quotactl_fd": 443, "open_tree_attr": 467,
}  # fmt: skip
_ARCHITECTURES = {"x86_64": (0xC000003E, _X86), "aarch64": (0xC00000B7, _ARM)}
_FILTERED = frozenset({"clone", "unshare", "socket", "clone3"})
"""Looked at with their arguments; everything else in the tables is refused."""

_AUDIT, _TABLE = _ARCHITECTURES.get(platform.machine(), (0, {}))
_NUMBERS = {**_COMMON, **_TABLE}

_LD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_AF_ALG, _AF_VSOCK = 38, 40


def _program() -> list[tuple[int, int, int, int]]:
    """(code, jump if true, jump if false, constant)."""
    arg0 = 16
    ret_eperm = (_RET, 0, 0, _ERRNO | errno.EPERM)
    ret_enosys = (_RET, 0, 0, _ERRNO | errno.ENOSYS)
    out: list[tuple[int, int, int, int]] = [
        (_LD, 0, 0, 4),
        (_JEQ, 1, 0, _AUDIT),
        ret_enosys,
        (_LD, 0, 0, 0),
        (_JGE, 0, 1, 0x40000000),  # the x32 numbers
        ret_enosys,
        (_JEQ, 0, 1, _NUMBERS["clone3"]),  # its flags can not be seen; the C library falls back to clone
        ret_enosys,
        (_JEQ, 0, 4, _NUMBERS["clone"]),
        (_LD, 0, 0, arg0),
        (_JSET, 0, 1, _ALL_NEW),
        ret_eperm,
        (_RET, 0, 0, _ALLOW),
        (_JEQ, 0, 4, _NUMBERS["unshare"]),
        (_LD, 0, 0, arg0),
        (_JSET, 0, 1, _ALL_NEW | _CLONE_NEWTIME),
        ret_eperm,
        (_RET, 0, 0, _ALLOW),
        # Neither belongs to a network namespace: vsock reaches a hypervisor, alg the kernel's crypto.
        (_JEQ, 0, 5, _NUMBERS["socket"]),
        (_LD, 0, 0, arg0),
        (_JEQ, 1, 0, _AF_VSOCK),
        (_JEQ, 0, 1, _AF_ALG),
        (_RET, 0, 0, _ERRNO | errno.EAFNOSUPPORT),
        (_RET, 0, 0, _ALLOW),
    ]
    denied = sorted({n for name, n in _NUMBERS.items() if name not in _FILTERED})
    for at, number in enumerate(denied):
        out.append((_JEQ, len(denied) - at, 0, number))
    return [*out, (_RET, 0, 0, _ALLOW), ret_eperm]


def seccomp_code() -> bytes:
    """The filter of this machine's architecture as the kernel takes it, eight bytes an instruction."""
    if _AUDIT == 0:
        raise OSError(errno.ENOSYS, f"no filter for {platform.machine()}", "seccomp")
    return b"".join(struct.pack("=HBBI", *line) for line in _program())


def install_seccomp() -> None:
    """Refuse, for this process and all that come from it, what no command in a sandbox needs."""
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    code = seccomp_code()
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    _checked(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0), "seccomp")
