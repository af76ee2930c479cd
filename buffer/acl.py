"""What a client of the buffer must be allowed to do: the rules of a Redis user who can do nothing else."""

from __future__ import annotations

from typing import Final

SCRIPT_COMMANDS: Final = (
    *("del", "exists", "get", "persist", "set", "unlink", "time"),
    *("hdel", "hexists", "hget", "hgetall", "hincrby", "hmget", "hset", "hsetnx"),
    *("llen", "lpop", "lpush", "ltrim", "rpop", "rpush"),
    *("zadd", "zcard", "zrange", "zrangebyscore", "zrem", "zremrangebyrank", "zscore"),
)
"""Commands that the scripts call."""

CLIENT_COMMANDS: Final = (
    *("auth", "hello", "info", "ping", "select"),
    *("evalsha", "script|load"),
    *("blpop", "expire", "hget", "lrange", "lrem", "mget", "rename", "scan"),
)
"""Commands that the clients send, besides ``set``, ``persist`` and ``unlink``."""

USER: Final = "headrace"


def rules(run: str, password: str) -> list[str]:
    """Rules of ``ACL SETUSER``: the commands used, on the keys of ``run`` (``*`` for all runs), and nothing else.

    Args:
        run: name of the run.
        password: of the user; without white space.
    """
    # CLIENT SETINFO, which redis-py sends, is not among them: servers differ in it, and clients do without.
    commands = dict.fromkeys((*SCRIPT_COMMANDS, *CLIENT_COMMANDS))
    return ["reset", "on", f">{password}", f"~{{headrace:{run}}}:*", "-@all", *(f"+{name}" for name in commands)]
