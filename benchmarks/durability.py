"""``python -m benchmarks.durability``: what is gone after ``kill -9`` of the embedded server, which syncs every second.

Exit status: 0 success; 2 a bad option; 130 stopped by Ctrl-C; 1 a measurement went wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import closing
from dataclasses import asdict, dataclass, field

import numpy as np
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from benchmarks.crew import BenchmarkError
from benchmarks.workload import GROUP_SIZE, random_trajectory, stamped
from buffer import Buffer, BufferError, BufferUnavailable, Commit, EmbeddedRedis, Limits, State, Trajectory
from buffer.guard import LEAST_SECONDS
from buffer.keys import Keys
from buffer.protocol import Member

RUN = "durability"

DESCRIPTION = f"""\
Several writers commit groups of {GROUP_SIZE} trajectories to an embedded Redis, until it is killed with kill -9 in the
middle of that. Its guard starts it again; then every trajectory whose commit was accepted is looked for.

It prints a table. With --json its last line is one JSON object:
  {{SIZE: {{accepted, gone, without_payload, trials_with_loss, trials: [{{accepted, gone, without_payload, gone_seconds,
   restart_seconds}}, ...]}}}}
SIZE is in KB of 1000 bytes; all but the seconds count trajectories. gone_seconds: how long before the kill the first
one of those that are gone had been accepted; restart_seconds: until the server answered again.
"""


@dataclass(frozen=True, slots=True)
class Trial:
    """What one kill did.

    Attributes:
        accepted: trajectories whose commit was accepted before it.
        gone: those that the buffer does not know any more.
        without_payload: those that it knows and has no bytes of.
        gone_seconds: age, at the kill, of the first commit that is gone; 0 if none is.
        restart_seconds: time until the server answered again.
    """

    accepted: int
    gone: int
    without_payload: int
    gone_seconds: float
    restart_seconds: float


@dataclass(slots=True)
class Writers:
    """Threads that commit groups until they are told to end, or the server does not answer.

    Attributes:
        accepted: groups whose commit was accepted, and when, by the monotonic clock.
    """

    accepted: dict[str, float] = field(default_factory=dict)
    _end: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self, url: str, number: int, examples: list[Trajectory]) -> None:
        """Start ``number`` of them, who commit ``examples`` again and again."""
        for worker in range(number):
            thread = threading.Thread(target=self._write, args=(url, f"writer-{worker}", examples), daemon=True)
            thread.start()
            self._threads.append(thread)

    def end(self) -> None:
        """Wait until all have ended."""
        self._end.set()
        for thread in self._threads:
            thread.join()

    def _write(self, url: str, name: str, examples: list[Trajectory]) -> None:
        with closing(Buffer(url, RUN, timeout_seconds=30)) as buffer:
            while not self._end.is_set():
                try:
                    slot = buffer.reserve(name, timeout=0)
                    answers = buffer.commit(*stamped(examples, slot.group, slot.task, slot.version))
                except BufferUnavailable:
                    return
                if set(answers) == {Commit.ACCEPTED}:
                    self.accepted[slot.group] = time.monotonic()


def trial(kilobytes: int, writers: int, seconds: float, seed: int) -> Trial:
    """Write for so long, kill the server, and count what is left of what it accepted."""
    rng = np.random.default_rng(seed)
    examples = [random_trajectory(1000 * kilobytes, rng) for _ in range(GROUP_SIZE)]
    with (
        tempfile.TemporaryDirectory(prefix="headrace-durability-") as folder,
        EmbeddedRedis(folder, run=RUN) as server,
        closing(Buffer(server.url, RUN, timeout_seconds=30)) as buffer,
        redis.Redis.from_url(server.admin_url, retry=Retry(NoBackoff(), 0)) as admin,
    ):
        buffer.open(
            Limits(
                max_staleness=1_000,
                max_age_seconds=math.inf,
                groups_per_batch=1_000,
                group_size=GROUP_SIZE,
                max_bytes=1 << 40,
                slot_seconds=3600,
                max_attempts=1,
            )
        )
        crew = Writers()
        crew.start(server.url, writers, examples)
        time.sleep(seconds)
        killed = time.monotonic()
        os.kill(server.pid, signal.SIGKILL)
        accepted = dict(crew.accepted)  # what is accepted from now on, the new server accepts
        _await_answer(admin)
        restart_seconds = time.monotonic() - killed
        crew.end()
        found = {info.group: info.members for info in buffer.groups(State.READY, 1_000_000)}
        gone = [group for group in accepted if group not in found]
        missing = _without_payload(admin, [group for group in accepted if group in found], found)
    return Trial(
        accepted=GROUP_SIZE * len(accepted),
        gone=GROUP_SIZE * len(gone),
        without_payload=missing,
        gone_seconds=max((killed - accepted[group] for group in gone), default=0.0),
        restart_seconds=restart_seconds,
    )


def _await_answer(admin: redis.Redis) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            admin.ping()
            return
        except redis.ConnectionError as error:  # it is not there, or is reading its data
            if time.monotonic() > deadline:
                raise BenchmarkError("Redis did not answer within 120 s after it was killed") from error
            time.sleep(0.01)


def _without_payload(admin: redis.Redis, groups: list[str], found: dict[str, tuple[Member, ...]]) -> int:
    """Count members of ``groups`` whose bytes are not there."""
    keys = Keys(RUN)
    pipeline = admin.pipeline(transaction=False)
    for group in groups:
        for member in found[group]:
            pipeline.exists(keys.payload(group, member.index, member.nonce))
    return pipeline.execute().count(0)


def summary(trials: list[Trial]) -> dict[str, object]:
    """Return what the trials of one size did, for the JSON object."""
    return {
        "accepted": sum(each.accepted for each in trials),
        "gone": sum(each.gone for each in trials),
        "without_payload": sum(each.without_payload for each in trials),
        "trials_with_loss": sum(each.gone > 0 for each in trials),
        "trials": [asdict(each) for each in trials],
    }


def main() -> int:
    """Measure what the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.durability",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--sizes", nargs="+", type=int, default=[5, 50], metavar="KB", help="default: 5 50")
    parser.add_argument("--trials", type=int, default=6, metavar="N", help="kills for each size (default: 6)")
    parser.add_argument("--seconds", type=float, default=4.0, metavar="S", help="of writing before a kill (default: 4)")
    parser.add_argument("--writers", type=int, default=4, metavar="N", help="threads that write (default: 4)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what trajectories hold (default: 0)")
    options = parser.parse_args()
    if min(*options.sizes, options.trials, options.writers) < 1 or options.seconds <= LEAST_SECONDS:
        parser.error(f"numbers must be at least 1, and --seconds more than {LEAST_SECONDS:g}")
    results = {}
    print(f"{'KB':>5} {'trial':>5} {'accepted':>9} {'gone':>6} {'without payload':>16} {'gone s':>7} {'restart s':>10}")
    try:
        for size in options.sizes:
            trials = []
            for number in range(1, options.trials + 1):
                each = trial(size, options.writers, options.seconds, options.seed)
                trials.append(each)
                print(
                    f"{size:>5} {number:>5} {each.accepted:>9} {each.gone:>6} {each.without_payload:>16} "
                    f"{each.gone_seconds:>7.2f} {each.restart_seconds:>10.2f}",
                    flush=True,
                )
            results[str(size)] = summary(trials)
    except KeyboardInterrupt:
        return 130
    except (BenchmarkError, BufferError) as error:
        print(f"benchmarks.durability: error: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(results), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
