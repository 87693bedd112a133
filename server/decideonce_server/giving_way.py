"""How a process that computes for long gives way to others, on Linux.

It goes on on half of the cores, and in long slices of time: since Linux 6.12 what wakes up beside it and has shorter
slices runs at once. What Postgres begins on such a core waits for the next tick of the clock otherwise, up to 4 ms.
Priorities don't help: they hold within one session or container, and Postgres is in another.

The kernel moves nothing to a core that is busy with such a process, so the others crowd on the rest. What can be told
to run there steps aside: it has usual slices and goes first.
"""

import contextlib
import ctypes
import os
import platform
from collections.abc import Sequence
from pathlib import Path

# Those that this process may use; none where the system has no say in it (outside Linux).
CORES: Sequence[int] = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ()
# The last ones: where there is a choice, the kernel fills the first ones first.
_HALF = CORES[-(-len(CORES) // 2) :] or CORES

# The longest there is.
LONG_SLICE_NS = 100_000_000

_LIBC = ctypes.CDLL(None)
# Of <asm/unistd.h>; Python and most releases of glibc have no function for it.
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}.get(platform.machine())
# Of <linux/sched.h>.
_KEEP_POLICY = 0x08


class _Attributes(ctypes.Structure):
    """The first version of `struct sched_attr` in <linux/sched/types.h>."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("sched_policy", ctypes.c_uint32),
        ("sched_flags", ctypes.c_uint64),
        ("sched_nice", ctypes.c_int32),
        ("sched_priority", ctypes.c_uint32),
        ("sched_runtime", ctypes.c_uint64),
        ("sched_deadline", ctypes.c_uint64),
        ("sched_period", ctypes.c_uint64),
    )


def give_way(pid: int) -> None:
    """Have all threads of a process give way; one that is gone does so anyway."""
    _schedule(pid, _HALF, LONG_SLICE_NS)


def step_aside(pid: int) -> None:
    """Have all threads of a process, and what it forks, run on the half of the cores that others give way on."""
    _schedule(pid, _HALF, 0)


def take_part(pid: int) -> None:
    """Have all threads of a process run as others do."""
    _schedule(pid, CORES, 0)


def _schedule(pid: int, cores: Sequence[int], slice_ns: int) -> None:
    if not cores:
        return
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores)
            _set_slice(int(thread.name), slice_ns)


def _set_slice(thread: int, slice_ns: int) -> None:
    """Set how long a thread runs before others' turn, in ns; 0 is the kernel's own choice, and a refusal leaves it."""
    if _SCHED_SETATTR is None:
        return
    attributes = _Attributes(
        size=ctypes.sizeof(_Attributes),
        sched_flags=_KEEP_POLICY,
        sched_nice=os.getpriority(os.PRIO_PROCESS, thread),
        sched_runtime=slice_ns,
    )
    _LIBC.syscall(_SCHED_SETATTR, thread, ctypes.byref(attributes), 0)
