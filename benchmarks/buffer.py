"""``python -m benchmarks.buffer``: the buffer against the limit of its server, and against what one would use instead.

Exit status: 0 success; 2 a bad option, which one line names; 130 stopped by Ctrl-C; 1 a measurement went wrong.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NoReturn

import redis
from rich.console import Console

from benchmarks.batch import large_batch
from benchmarks.crew import BenchmarkError
from benchmarks.report import Report, print_machine
from benchmarks.scaling import scaling
from benchmarks.throughput import CONTENDERS, RAY_CONTENDERS, REDIS_CONTENDERS, local_ray, through_ray, through_redis
from benchmarks.workload import BATCH_GROUPS, Workload
from buffer import BufferError, EmbeddedRedis

PARTS = (*CONTENDERS, "lease_100mb", "scaling")

DESCRIPTION = """\
Measures the buffer end to end: several writer processes and one reader on this machine, through one embedded Redis.

parts, in this order:
  raw_redis            bare SET/GET pipelines of the same bytes on the same server: the limit
  redis_stream_pickle  a Redis stream of pickles: XADD, XREADGROUP
  headrace             reserve, commit, lease, ack, checkpointed
  lease_100mb          a ready batch of 256 trajectories, leased and decoded, against a bare GET of its bytes
  scaling              what each call costs while more and more groups are stored
  ray_queue            ray.util.queue.Queue with put and get
  ray_queue_batched    the same with put_nowait_batch and get_nowait_batch

It prints tables. With --json its last line is one JSON object:
  {SIZE: {CONTENDER: {mb_s, traj_s, p99_ms}}, ratio_to_raw: {SIZE: ...}, ratio_to_ray_queue: {SIZE: ...},
   ratio_to_stream: {SIZE: ...}, lease_100mb: {headrace_ms, pipelined_get_ms, ratio},
   scaling: {GROUPS: {reserve_us, ...}}}
SIZE is in KB of 1000 bytes; mb_s and traj_s are what the reader got, p99_ms is of a write call of 8 trajectories,
ratios are headrace's MB/s in units of the other's.
"""

SECONDS_HELP = "how long each measurement takes, after one second of warm-up"
ROUNDS_HELP = "measurements of each contender on Redis, taking turns, of which the median counts; Ray's have one"
GROUPS_HELP = "stored groups at which scaling is measured (default: 1000 10000 100000)"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"benchmarks.buffer: error: {message}; see --help\n")


def main() -> int:
    """Measure what the command line asks for; return the exit status."""
    options = _options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it ends what it started, as after Ctrl-C
    report = Report()
    status = 0
    try:
        with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder, EmbeddedRedis(folder) as server:
            redis_version = _redis_version(server)
            _measure(options, server, report)
    except KeyboardInterrupt:
        _say("stopped")
        return 130
    except (BenchmarkError, BufferError) as error:
        _say(f"error: {error}")
        status = 1
    console = Console() if sys.stdout.isatty() else Console(width=160)
    report.print(console)
    if status == 0:
        print_machine(console, redis_version, options.seed)
        if options.json:
            print(json.dumps(report.as_json()), flush=True)
    return status


def _measure(options: argparse.Namespace, server: EmbeddedRedis, report: Report) -> None:
    """Measure each part into ``report``; Ray comes last, so that nothing else runs beside it."""
    workloads = [Workload(size, options.writers, options.seed) for size in options.sizes]
    redis_contenders = [name for name in REDIS_CONTENDERS if name in options.only]
    for workload in workloads:
        for number in range(1, options.rounds + 1):
            for name in redis_contenders:
                _say(f"{name}, {workload.kilobytes} KB, round {number} of {options.rounds}")
                report.add(name, through_redis(name, server, workload, options.seconds))
    if "lease_100mb" in options.only:
        _say("lease_100mb")
        report.batch = large_batch(server, options.seed)
    if "scaling" in options.only:
        _say(f"scaling, up to {max(options.groups)} groups")
        report.costs = dict(scaling(server, options.groups, options.seed))
    if ray_contenders := [name for name in RAY_CONTENDERS if name in options.only]:
        with local_ray():
            for workload in workloads:
                for name in ray_contenders:
                    _say(f"{name}, {workload.kilobytes} KB")
                    report.add(name, through_ray(name, workload, options.seconds))


def _options() -> argparse.Namespace:
    parser = _Parser(
        prog="python -m benchmarks.buffer",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 success; 2 a bad option; 130 stopped by Ctrl-C; 1 a measurement went wrong.",
    )
    add = parser.add_argument
    add("--json", action="store_true", help="end with one line of JSON")
    add("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help="measure these parts (default: all)")
    sizes, groups = _within(int, 1, 2000), _within(int, BATCH_GROUPS, 1_000_000)
    add(
        "--sizes", nargs="+", type=sizes, default=[5, 50, 600], metavar="KB", help="of a trajectory (default: 5 50 600)"
    )
    add("--writers", type=_within(int, 1, 64), default=8, metavar="N", help="processes that write (default: 8)")
    add("--seconds", type=_within(float, 0.5, 600), default=3.0, metavar="S", help=f"{SECONDS_HELP} (default: 3)")
    add("--rounds", type=_within(int, 1, 100), default=3, metavar="N", help=f"{ROUNDS_HELP} (default: 3)")
    add("--groups", nargs="+", type=groups, default=[1_000, 10_000, 100_000], metavar="N", help=GROUPS_HELP)
    add("--seed", type=_within(int, 0, 2**32), default=0, metavar="N", help="of what trajectories hold (default: 0)")
    return parser.parse_args()


def _within[N: (int, float)](kind: type[N], least: N, most: N) -> Callable[[str], N]:
    """Return a converter for argparse that takes numbers from ``least`` to ``most``."""

    def convert(text: str) -> N:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {most}")
        return value

    return convert


def _redis_version(server: EmbeddedRedis) -> str:
    admin = redis.Redis.from_url(server.admin_url)
    info: Any = admin.info("server")
    admin.close()
    return str(info["redis_version"])


def _say(text: str) -> None:
    print(f"benchmarks.buffer: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
