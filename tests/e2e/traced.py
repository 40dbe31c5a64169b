"""Processes in states that last microseconds, reached as a debugger reaches them (ptrace)."""
import ctypes
import mmap
import os
import pathlib
import platform
import signal
import time
import unittest

SEIZE, INTERRUPT, SINGLESTEP, DETACH, WALL = 0x4206, 0x4207, 9, 17, 0x40000000
FUTEX = {"x86_64": "202", "aarch64": "98"}.get(platform.machine())
QUEUE_BYTES, QUEUE_MORE = 2048 * 128, 65536  # elements of a queue of UCX's (common/xfer/env.c); its heads are small
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
libc.ptrace.restype = ctypes.c_long


def trace(request, tid):
    """Skips the test where tracing is not allowed."""
    if libc.ptrace(request, tid, None, None) == 0:
        return
    error = ctypes.get_errno()
    if request == SEIZE and isinstance(OSError(error, ""), PermissionError):
        raise unittest.SkipTest(f"ptrace: {os.strerror(error)}")
    raise OSError(error, f"ptrace: {os.strerror(error)}")


def has_no_lock(pid, tid):
    """Whether a stopped thread waits for something or is in the program's own code. In the C library, or in a call
    of the kernel's, it may have a lock in its hands (the allocator's, the log's, a queue's), so that others hang too."""
    call, *_, at = pathlib.Path(f"/proc/{pid}/task/{tid}/syscall").read_text().split()
    if call != "-1":
        return call == FUTEX
    program = os.readlink(f"/proc/{pid}/exe")
    for line in pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines():
        begin, end = (int(x, 16) for x in line.split()[0].split("-"))
        if begin <= int(at, 16) < end:
            return line.endswith(program)
    return False


def stop_thread(pid, tid):
    """Stops one thread, where it has no lock. Who calls traces it from now on."""
    for _ in range(1000):
        trace(SEIZE, tid)
        trace(INTERRUPT, tid)
        os.waitpid(tid, WALL)
        if has_no_lock(pid, tid):
            return
        trace(DETACH, tid)
        time.sleep(0.001)
    raise AssertionError(f"thread {tid} of process {pid} has a lock whenever it is stopped")


def queue_of(pid):
    """The path of the queue that a worker receives from."""
    for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        try:
            if "/ucx_shm_posix" in os.readlink(fd) and 0 <= fd.stat().st_size - QUEUE_BYTES <= QUEUE_MORE:
                return fd
        except FileNotFoundError:
            pass
    raise AssertionError(f"process {pid} has no queue")


def kill_inside_a_send(sender, receiver, others):
    """Kills `sender` when it has taken a place in `receiver`'s queue and not filled it. It is stepped until the
    queue's head moves; `others`, who may write there too, are stopped meanwhile."""
    for pid in others:
        os.kill(pid, signal.SIGSTOP)
    try:
        with open(queue_of(receiver), "rb") as f, mmap.mmap(f.fileno(), 4096, prot=mmap.PROT_READ) as queue:
            def places():
                return int.from_bytes(queue[:7], "little")  # the last byte has UCX's mark for "wake me"

            trace(SEIZE, sender)
            trace(INTERRUPT, sender)
            os.waitpid(sender, WALL)
            before = places()
            while places() == before:
                trace(SINGLESTEP, sender)
                os.waitpid(sender, WALL)
            os.kill(sender, signal.SIGKILL)
            os.waitpid(sender, WALL)
    finally:
        for pid in others:
            os.kill(pid, signal.SIGCONT)
