"""``headrace buffer``: look into a buffer, print a trajectory of it, empty it.

A buffer is named by the URL of its Redis, or by the folder of a run whose own Redis is up.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from actors.chat import Chat
from buffer import OUTCOMES, Buffer, BufferUnavailable, GroupInfo, NotOpen, State, Stats, Trajectory, acl, runs_in
from buffer.keys import Keys
from buffer.server import admin_url_in
from cluster.errors import RunError

TIMEOUT_SECONDS = 10.0
MOST_GROUPS = 1000
"""Groups of each state that are looked at: a table of more is read by nobody."""

_TOKENIZERS = ("initial_model", "model", "new_model")


@dataclasses.dataclass(frozen=True)
class Target:
    """A buffer that was found.

    Attributes:
        buffer: its client.
        run: name of the run in it.
        tokenizer: folder of the run's tokenizer, if it is known.
    """

    buffer: Buffer
    run: str
    tokenizer: Path | None


def find(target: str, run: str | None, payload_urls: Sequence[str]) -> Target:
    """Find the buffer that ``target`` names.

    Args:
        target: URL of Redis, or a run folder.
        run: name of the run in Redis; None if there is one only.
        payload_urls: its payload instances.

    Raises:
        RunError: there is no such folder or run, or the folder's Redis is not its own.
        BufferUnavailable: Redis does not answer.
    """
    if "://" not in target:
        if run is not None or payload_urls:
            raise RunError(f"{target} is a run folder, which names its run itself; leave out --run and --payload-url")
        return _of_folder(Path(target))
    if run is None:
        runs = runs_in(target, timeout_seconds=TIMEOUT_SECONDS)
        if not runs:
            raise RunError("no run has a buffer in this Redis; check the URL and its database number")
        if len(runs) > 1:
            names = ", ".join(runs[:10]) + (", ..." if len(runs) > 10 else "")
            raise RunError(f"{len(runs)} runs have a buffer in this Redis ({names}); choose one by --run")
        [run] = runs
    try:
        buffer = Buffer(target, run, timeout_seconds=TIMEOUT_SECONDS, payload_urls=payload_urls)
        instances = buffer.payload_instances()
    except ValueError as error:  # the name
        raise RunError(f"--run: {error}") from error
    except NotOpen as error:
        raise RunError(f"--run {run}: no such run in this Redis; leave it out to see which there are") from error
    if instances != len(payload_urls):
        raise RunError(
            f"the payloads of run {run} are on {instances} payload instances, and {len(payload_urls)} were given; pass "
            "--payload-url for each, in the order of buffer.payload_urls"
        )
    return Target(buffer, run, None)


def print_stats(target: Target, *, as_json: bool, console: Console) -> None:
    """Print what is inside: groups and their ages, leases and slots and who holds them, and what became of groups."""
    stats = target.buffer.stats()
    groups = {state: target.buffer.groups(state, MOST_GROUPS) for state in State}
    if as_json:
        console.print_json(json.dumps(_as_data(target.run, stats, groups)))
        return
    limits = stats.limits
    age = "no limit" if limits.max_age_seconds == math.inf else f"{limits.max_age_seconds:g} s"
    console.print(
        Text.assemble(
            (f"run {target.run}", "bold"),
            f"  version {stats.version}, learner epoch {stats.epoch}"
            + (f" of {stats.holder}" if stats.holder else "")
            + f"\nadmits {limits.max_groups} groups of {limits.group_size} and {_size(limits.max_bytes)}; "
            f"trains {limits.groups_per_batch} groups at once, {limits.order}, at most {limits.max_staleness} versions "
            f"and {age} old",
        )
    )
    tables = {"groups": _states(stats, groups), "what became of groups": _outcomes(stats)}
    if groups[State.LEASED]:
        tables[f"leases, held by learner epoch {stats.epoch} of {stats.holder}"] = _leases(groups[State.LEASED])
    if groups[State.RESERVED]:
        tables["slots"] = _slots(groups[State.RESERVED])
    for title, table in tables.items():
        console.print(Text(f"\n{title}", style="bold"), table, sep="\n")
    cut = [str(state) for state, found in groups.items() if len(found) == MOST_GROUPS]
    if cut:
        console.print(
            f"\nOf the groups that are {' or '.join(cut)}, bytes and ages are of the first {MOST_GROUPS} only."
        )


def print_trajectory(
    target: Target, *, group: str | None, index: int | None, tokenizer: Path | None, as_json: bool, console: Console
) -> None:
    """Print one trajectory as text, what the policy was given and what it sampled apart.

    Args:
        target: where it is.
        group: its group; None for the one that is leased next, or else held, or else kept.
        index: which member; None for the first that is there.
        tokenizer: folder of the tokenizer; None prints token ids.
        as_json: print the arrays instead.
        console: where to print.

    Raises:
        RunError: there is no such trajectory.
    """
    found = (
        info for state in (State.READY, State.LEASED, State.KEPT, State.RESERVED) for info in _listed(target, state)
    )
    info = next((info for info in found if (group is None and info.bytes) or info.group == group), None)
    if info is None:
        wanted = f"--group {group}: no such group" if group else "nothing to print: no trajectory"
        raise RunError(f"{wanted} in the buffer of run {target.run}; `headrace buffer stats` shows what there is")
    try:
        trajectory = target.buffer.peek(info, index)
    except ValueError as error:
        raise RunError(str(error)) from error
    if as_json:
        console.print_json(json.dumps(_trajectory_data(info, trajectory)))
        return
    console.print(_headline(info, trajectory))
    console.print(_spans(trajectory, tokenizer))


def print_rules(run: str) -> None:
    """Print the command that makes a Redis user who may do what the buffer of ``run`` needs, and nothing else.

    Raises:
        RunError: no run can have this name.
    """
    if run != "*":
        try:
            Keys(run)
        except ValueError as error:
            raise RunError(str(error)) from error
    print(" ".join(["ACL SETUSER", acl.USER, *acl.rules(run, "PASSWORD")]))


def _of_folder(folder: Path) -> Target:
    """The buffer of a run whose own Redis is up."""
    url = _url_of(folder)
    run = (folder / "run_id").read_text(encoding="utf-8").strip()
    buffer = Buffer(url, run, timeout_seconds=TIMEOUT_SECONDS)
    try:
        buffer.version()
    except BufferUnavailable as error:
        raise RunError(f"the Redis of the run in {folder} is not up: it runs as long as the run does") from error
    tokenizer = next((folder / name for name in _TOKENIZERS if (folder / name / "tokenizer.json").is_file()), None)
    return Target(buffer, run, tokenizer)


def _url_of(folder: Path) -> str:
    """URL of the Redis of a run folder, as its administrator."""
    if not (folder / "config.yaml").is_file():
        raise RunError(f"{folder} is neither a URL nor a run folder; expected redis://... or runs/NAME")
    from cluster.runfolder import stored_settings  # brings the whole schema along, which a URL does not need

    url = stored_settings(folder)["buffer"]["url"]
    if url is not None:
        raise RunError(f"the run in {folder} uses the Redis at {url}; give that URL, with its password, and --run")
    own = admin_url_in(folder / "redis")
    if own is None:
        raise RunError(f"the run in {folder} has not started a Redis yet; try again when it has")
    return own


def _listed(target: Target, state: State) -> list[GroupInfo]:
    return target.buffer.groups(state, MOST_GROUPS)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position else "left", header_style="dim")
    return table


def _states(stats: Stats, groups: dict[State, list[GroupInfo]]) -> Table:
    table = _table("state", "groups", "trajectories", "bytes", "oldest", "versions")
    counts = {
        State.RESERVED: stats.reserved,
        State.READY: stats.ready,
        State.LEASED: stats.leased,
        State.KEPT: stats.kept,
    }
    meaning = {
        State.RESERVED: "reserved (episodes run)",
        State.READY: "ready",
        State.LEASED: "leased",
        State.KEPT: "kept for a rollback",
    }
    for state, found in groups.items():
        versions = [info.oldest_version for info in found if info.oldest_version is not None]
        table.add_row(
            meaning[state],
            str(counts[state]),
            str(sum(len(info.members) for info in found)),
            _size(sum(info.bytes for info in found)),
            _seconds(max((info.age_seconds for info in found), default=None)),
            _range(versions),
        )
    table.add_row("all payloads", "", "", _size(stats.bytes), "", "")
    return table


def _outcomes(stats: Stats) -> Table:
    table = _table("outcome", "groups")
    for name in ("reserved", *OUTCOMES):
        table.add_row(name, str(stats.counters[name]))
        if name == "acked" and stats.unsaved:
            table.add_row("  in no checkpoint yet", str(stats.unsaved))
        for detail, count in sorted(stats.counters.items()):
            if detail.startswith(f"{name}:") and count:
                table.add_row(f"  {detail.partition(':')[2]}", str(count))
    table.add_row("unaccounted", str(stats.unaccounted), style=None if stats.unaccounted == 0 else "bold red")
    others = {
        name: count
        for name, count in sorted(stats.counters.items())
        if count and name != "reserved" and name.partition(":")[0] not in OUTCOMES
    }
    for name, count in others.items():
        table.add_row(_EVENTS.get(name, name), str(count), style="dim")
    return table


_EVENTS = {
    "redelivered": "put back by a new learner",
    "rolled_back": "put back by a rollback",
    "short_groups": "complete with fewer members",
    "tasks_given_up": "tasks given up",
    "uses": "trained, each use",
}
"""What the counters of events count."""


def _leases(leased: list[GroupInfo]) -> Table:
    table = _table(
        "trains version",
        "groups",
        "bytes",
        "oldest",
        "versions",
    )
    by_version: dict[int, list[GroupInfo]] = defaultdict(list)
    for info in leased:
        by_version[info.lease_version or 0].append(info)
    for version, infos in sorted(by_version.items()):
        table.add_row(
            str(version),
            str(len(infos)),
            _size(sum(info.bytes for info in infos)),
            _seconds(max(info.age_seconds for info in infos)),
            _range([info.oldest_version for info in infos if info.oldest_version is not None]),
        )
    return table


def _slots(reserved: list[GroupInfo]) -> Table:
    table = _table("worker", "slots", "trajectories in", "oldest", "next expires in")
    by_worker: dict[str, list[GroupInfo]] = defaultdict(list)
    for info in reserved:
        by_worker[info.worker].append(info)
    for worker, infos in sorted(by_worker.items()):
        table.add_row(
            worker,
            str(len(infos)),
            f"{sum(len(info.members) for info in infos)} of {sum(info.size for info in infos)}",
            _seconds(max(info.age_seconds for info in infos)),
            _seconds(min(info.expires_seconds or 0.0 for info in infos)),
        )
    return table


def _headline(info: GroupInfo, trajectory: Trajectory) -> Text:
    sampled = int(trajectory.loss_mask.sum())
    versions = _range(trajectory.versions[trajectory.loss_mask].tolist())
    lines = [
        f"task {trajectory.task}, {info.state}, {len(trajectory.tokens)} tokens of which {sampled} sampled, "
        f"by version {versions} on {trajectory.sampler or 'a sampler without name'}",
        ", ".join(
            [
                f"{trajectory.status}, reward {trajectory.reward:g}, {info.age_seconds:.1f} s old",
                *(f"{name} {seconds:.2f} s" for name, seconds in trajectory.timings.items()),
            ]
        ),
    ]
    if trajectory.metadata:
        lines.append(json.dumps(trajectory.metadata, ensure_ascii=False))
    return Text.assemble(
        (f"group {info.group}, member {trajectory.index} of {info.size}\n", "bold"), "\n".join(lines) + "\n"
    )


def _spans(trajectory: Trajectory, tokenizer: Path | None) -> Table:
    """One row for each run of tokens that were given, or sampled."""
    read = _ids if tokenizer is None else Chat(tokenizer).decode
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("", "version", "logprob", "reward"):
        table.add_column(column, justify="left" if not column else "right", vertical="top")
    table.add_column("tokens" if tokenizer is None else "text", overflow="fold")
    turn = 0
    edges = np.flatnonzero(np.diff(trajectory.loss_mask.astype(np.int8))) + 1
    for span in np.split(np.arange(len(trajectory.tokens)), edges):
        text = read(trajectory.tokens[span])
        if not trajectory.loss_mask[span[0]]:
            table.add_row("given", "", "", "", Text(text, style="dim"))
            continue
        reward = f"{trajectory.rewards[turn]:g}" if turn < len(trajectory.rewards) else ""
        turn += 1
        logprob = f"{float(trajectory.logprobs[span].mean()):.3f}"
        table.add_row(
            "sampled", _range(trajectory.versions[span].tolist()), logprob, reward, Text(text, style="bold green")
        )
    return table


def _ids(tokens_S: Sequence[int] | np.ndarray) -> str:
    return " ".join(str(int(token)) for token in tokens_S)


def _as_data(run: str, stats: Stats, groups: dict[State, list[GroupInfo]]) -> dict[str, Any]:
    data = dataclasses.asdict(stats)
    if stats.limits.max_age_seconds == math.inf:
        data["limits"]["max_age_seconds"] = None
    listed = {str(state): [dataclasses.asdict(info) for info in found] for state, found in groups.items()}
    return {"run": run, **data, "unaccounted": stats.unaccounted, "groups": listed}


def _trajectory_data(info: GroupInfo, trajectory: Trajectory) -> dict[str, Any]:
    data = {field.name: getattr(trajectory, field.name) for field in dataclasses.fields(trajectory)}
    plain = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in data.items()}
    return {**plain, "state": str(info.state), "age_seconds": info.age_seconds}


def _size(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f} s"


def _range(versions: Iterable[int]) -> str:
    distinct = sorted(set(versions))
    if not distinct:
        return ""
    return str(distinct[0]) if len(distinct) == 1 else f"{distinct[0]}..{distinct[-1]}"
