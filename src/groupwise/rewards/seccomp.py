"""System calls that a sandboxed program does without, as the filter that Linux takes (seccomp-bpf).

Refused are memory that no limit counts (System V and anonymous files), new namespaces and mounts, other processes'
memory, keys, and parts of the kernel that have let programs out before.  On other processors there is no filter.
"""

from __future__ import annotations

import errno
import platform
import struct
from functools import cache

# name: (number on x86_64, on aarch64)
_REFUSED = {
    "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190),
    "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "mount_setattr": (442, 442),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
}  # fmt: skip
_CLONE, _CLONE3 = (56, 220), 435
_NEW_NAMESPACES = 0x7E020000  # every CLONE_NEW... flag
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000  # from here on, x86_64 has its calls a second time
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # where they are in struct seccomp_data
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000


@cache
def seccomp_filter() -> bytes:
    """The filter for this processor; empty where we have no numbers for it."""
    machine = platform.machine()
    if machine not in _AUDIT_ARCH:
        return b""
    which = list(_AUDIT_ARCH).index(machine)
    absent, refused = _ERROR | errno.ENOSYS, _ERROR | errno.EPERM
    steps = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, _AUDIT_ARCH[machine]), (_RETURN, 0, 0, _KILL)]
    steps += [(_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, absent)]
    # Its flags are in memory, out of a filter's sight; the C library then falls back on clone.
    steps += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, absent)]
    for numbers in _REFUSED.values():
        steps += [(_EQUAL, 0, 1, numbers[which]), (_RETURN, 0, 0, refused)]
    steps += [(_EQUAL, 0, 3, _CLONE[which]), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    steps += [(_ANY_BIT, 0, 1, _NEW_NAMESPACES), (_RETURN, 0, 0, refused), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
