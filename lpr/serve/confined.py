"""Confinement of lpr.serve.sandboxed on Linux: no new privileges, no network, no access to other processes."""

import ctypes
import errno
import os
import platform
import struct
import sys

_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_REFUSED = {
    "socket": (41, 198), "connect": (42, 203), "socketpair": (53, 199), "execve": (59, 221), "execveat": (322, 281),
    "kill": (62, 129), "tkill": (200, 130), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "bpf": (321, 280),
    "perf_event_open": (298, 241), "io_uring_setup": (425, 425), "unshare": (272, 97), "setns": (308, 268),
    "mount": (165, 40), "keyctl": (250, 219), "userfaultfd": (323, 282),
}  # fmt: skip
"""Numbers of system calls that no task needs, on x86_64 and aarch64."""
_TGKILL = (234, 131)  # tgkill: allowed for the process itself, because abort() uses it
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000 | errno.EPERM


def confine() -> None:
    """For this process and its forks: no new privileges, and no network if user namespaces are allowed."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
        libc.unshare(0x10000000 | 0x40000000)  # CLONE_NEWUSER | CLONE_NEWNET; some systems refuse it


def filter_calls() -> None:
    """Install a seccomp filter, if the kernel has them, that refuses unneeded system calls. `confine` comes first."""
    if sys.platform != "linux" or platform.machine() not in _AUDIT:
        return
    machine = platform.machine()
    which = list(_AUDIT).index(machine)
    numbers = [each[which] for each in _REFUSED.values()]
    # Each instruction is (code, jump if true, jump if false, value); jumps count skipped instructions.
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _AUDIT[machine]), (_RETURN, 0, 0, _FAIL), (_LOAD, 0, 0, 0)]
    program += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _FAIL)]  # x32's numbers of the same calls
    for number in numbers:
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _FAIL)]
    program += [(_EQUAL, 0, 3, _TGKILL[which]), (_LOAD, 0, 0, 16), (_EQUAL, 1, 0, os.getpid()), (_RETURN, 0, 0, _FAIL)]
    program += [(_RETURN, 0, 0, _ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    head = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    ctypes.CDLL(None).prctl(22, 2, ctypes.c_char_p(head), 0, 0)  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
