"""The guard: a tiny process that outlives its driver just long enough to stop Redis properly.

It is no descendant of the driver: whatever signals the driver's process tree or group (Ctrl-C, ``ray job stop``)
leaves Redis alive while the driver still needs it to save. And however the driver ends, ``kill -9`` included,
the kernel closes its end of the channel, and the guard stops Redis and ends too.

A server that is killed or crashes is started again, unless it keeps ending: its data are on the disk, and
clients wait for it.

Run as ``guard.py CHANNEL_FD LOCK_FD STOP_SECONDS SERVER CONFIG``, by path and isolated, so that it imports the
standard library only. On the channel it reports ``started PID`` (at each start), ``busy`` or ``ended STATUS``, one line
each.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import time

LEAST_SECONDS = 1.0
"""A server that ended sooner than this after its first start could not start."""
MOST_RESTARTS, WITHIN_SECONDS = 5, 60.0
"""A server that ends so often within so long is left alone."""


def main(arguments: list[str]) -> None:
    """Detach from the driver, start Redis, wait for the driver to end or to ask, stop Redis."""
    channel_fd, lock_fd, stop_seconds, server, config = arguments
    if os.fork():
        os._exit(0)  # the driver reaps this parent; the child below belongs to init
    channel = socket.socket(fileno=int(channel_fd))
    for descriptor in (channel.fileno(), int(lock_fd)):
        os.set_inheritable(descriptor, False)  # Redis must not hold them

    if not _lock(int(lock_fd), float(stop_seconds)):
        _report(channel, "busy")
        return

    # Wake up select() on these signals: Redis ended by itself, or somebody wants the guard to end.
    awake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)

    starts: list[float] = []
    while True:
        redis = subprocess.Popen([server, config], stdin=subprocess.DEVNULL, preexec_fn=_end_with_parent)
        starts.append(time.monotonic())
        _report(channel, f"started {redis.pid}")
        _wait(channel, awake, redis)
        now = time.monotonic()
        recent = sum(now - start < WITHIN_SECONDS for start in starts)
        never_started = len(starts) == 1 and now - starts[0] < LEAST_SECONDS
        if redis.poll() in (None, 0) or never_started or recent > MOST_RESTARTS:
            break
    _report(channel, f"ended {_stop(redis, float(stop_seconds))}")


def _lock(descriptor: int, seconds: float) -> bool:
    """Lock the data folder; its last server may still be stopping."""

    def give_up(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds + 1)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except TimeoutError:
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return True


def _wait(channel: socket.socket, awake: int, redis: subprocess.Popen[bytes]) -> None:
    """Return when the driver's end of the channel closes, Redis ends, or a signal says so."""
    while redis.poll() is None:
        readable, _, _ = select.select([channel.fileno(), awake], [], [])
        if channel.fileno() in readable and _closed(channel):
            return
        if awake in readable and set(os.read(awake, 64)) - {signal.SIGCHLD}:
            return


def _closed(channel: socket.socket) -> bool:
    try:
        return not channel.recv(1)
    except ConnectionError:  # the driver ended with a report unread
        return True


def _stop(redis: subprocess.Popen[bytes], seconds: float) -> int:
    """Let Redis write what it holds and end; after the deadline, kill it. Return its exit status."""
    redis.terminate()
    try:
        return redis.wait(seconds)
    except subprocess.TimeoutExpired:
        redis.kill()
        return redis.wait()


def _report(channel: socket.socket, line: str) -> None:
    with contextlib.suppress(OSError):  # the driver may be gone, which is what the guard is for
        channel.sendall(f"{line}\n".encode())


def _end_with_parent() -> None:
    """Have Redis stop if even the guard is killed. Linux only; elsewhere Redis would then stay."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    main(sys.argv[1:])
