"""What users and failing networks do to the buffer: a clear error, or no effect at all."""

import os
import signal
import socket
import time
from contextlib import contextmanager

import pytest
import redis
from buffer_examples import complete, limits, trajectory
from every_call import parameters, reserve

from buffer import AsyncBuffer, Buffer, BufferFull, BufferUnavailable, Commit, EmbeddedRedis, State


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_server_that_is_not_there_is_named_without_its_password(call):
    port = free_port()
    url = f"redis://user:secret-word@127.0.0.1:{port}/0"
    with pytest.raises(BufferUnavailable, match=rf"no answer from Redis at 127\.0\.0\.1:{port}") as failure:
        Buffer(url, "x", timeout_seconds=1).open(limits())
    assert "secret-word" not in str(failure.value)
    with pytest.raises(BufferUnavailable, match=rf"127\.0\.0\.1:{port}") as failure:
        call(AsyncBuffer(url, "x", timeout_seconds=1).reserve("worker", timeout=0))
    assert "secret-word" not in str(failure.value)


def test_a_server_that_does_not_answer_is_unavailable_after_the_timeout():
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(BufferUnavailable, match="Timeout"):
        Buffer(f"redis://127.0.0.1:{silent.getsockname()[1]}", "x", timeout_seconds=0.1).open(limits())


@pytest.mark.parametrize("credentials", ["", ":wrong@", "nobody:wrong@"])
def test_a_wrong_or_missing_password_says_so(server, credentials):
    with pytest.raises(BufferUnavailable, match=r"refused the user or password .* correct them in buffer\.url"):
        Buffer(f"redis://{credentials}127.0.0.1:{server.port}", "x", timeout_seconds=1).open(limits())


@pytest.mark.parametrize("url", ["http://localhost:6379", "localhost:6379", ""])
def test_a_url_of_another_kind_is_refused(url):
    with pytest.raises(BufferUnavailable, match="expected redis://host:port"):
        Buffer(url, "x", timeout_seconds=1)


@pytest.mark.parametrize("name", ["", "a b", "a}b", "x" * 129])
def test_a_run_name_that_cannot_be_part_of_a_key_is_refused(server, name):
    with pytest.raises(ValueError, match="rename the run"):
        Buffer(server.url, name, timeout_seconds=1)


def test_scripts_are_loaded_again_after_the_server_forgot_them(buffer, workers, call, raw):
    buffer.open(limits(groups_per_batch=1))
    epoch = buffer.begin_epoch()
    raw.script_flush()
    slot = call(workers.reserve("worker", timeout=0))
    for index in range(2):
        raw.script_flush()
        assert call(workers.commit(trajectory(slot.group, index))) is Commit.ACCEPTED
    raw.script_flush()
    assert buffer.lease(epoch, 0, timeout=0).group_ids == [slot.group]


# --- a full store ----------------------------------------------------------------------------------------------


@contextmanager
def full(raw, headroom=0):
    """The server takes ``headroom`` bytes more, and then no more."""
    raw.config_set("maxmemory", raw.info("memory")["used_memory"] + headroom if headroom else 1)
    try:
        yield
    finally:
        raw.config_set("maxmemory", 0)


@pytest.mark.parametrize(("kind", "case"), parameters([Buffer]))
def test_a_full_store_refuses_payloads_and_nothing_else(new_world, raw, kind, case):
    with new_world(kind) as world:
        expected = world.play(case)
    with new_world(kind) as world:
        action = world.arrange(case)
        before = world.state()
        with full(raw):
            try:
                result = action()
            except BufferFull:
                result = BufferFull
        refused = result is BufferFull
        assert (result, world.state()) == ((BufferFull, before) if refused else expected)
    # A commit that is not admitted anyhow is told so rather than that there is no memory.
    assert refused == case.__name__.startswith(("commit_first", "commit_last"))


def test_a_full_store_is_emptied_by_the_learner(buffer, workers, call, raw):
    buffer.open(limits(max_staleness=9, groups_per_batch=1))
    epoch = buffer.begin_epoch()
    call(complete(workers))
    slot = call(workers.reserve("worker", timeout=0))
    with full(raw):
        with pytest.raises(BufferFull, match=r"at its maxmemory: .* lower buffer\.max_bytes"):
            call(workers.commit(trajectory(slot.group, 0)))
        buffer.ack(buffer.lease(epoch, 0, timeout=0), 1)
        buffer.checkpointed(epoch, 1)
        stats = buffer.stats()
        assert (stats.version, stats.outstanding, stats.bytes, stats.unsaved, stats.unaccounted) == (1, 1, 0, 0, 0)
    assert call(workers.commit(trajectory(slot.group, 0, version=1))) is Commit.ACCEPTED


def test_trajectories_for_which_there_is_no_memory_are_committed_later(buffer, raw, run):
    members = 8
    buffer.open(limits(max_staleness=99, groups_per_batch=1, group_size=members))
    epoch = buffer.begin_epoch()
    stored = set()
    for version in range(20):
        slot = buffer.reserve("worker", timeout=0)
        batch = [trajectory(slot.group, index, version, tokens=2000) for index in range(members)]
        with full(raw, headroom=1 + 20_000 * version):
            try:
                buffer.commit(*batch)
                done = members
            except BufferFull:
                [info] = buffer.groups(State.RESERVED, 1)
                done = len(info.members)
        stored.add(done)
        assert not [name for name in raw.keys(f"{{headrace:{run}}}:payload:*") if raw.ttl(name) >= 0]
        again = buffer.commit(*batch)
        assert (again.count(Commit.DUPLICATE), again.count(Commit.ACCEPTED)) == (done, members - done)
        lease = buffer.lease(epoch, version, timeout=0)
        assert [member.index for member in lease.trajectories] == list(range(members))
        buffer.ack(lease, version + 1)
        buffer.checkpointed(epoch, version + 1)
    assert len(stored) > 2  # none, all, and some of them


# --- a slow server ---------------------------------------------------------------------------------------------


@contextmanager
def stopped(server):
    """The server stands still: it accepts connections, and reads nothing."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def until_it_answers(action):
    deadline = time.monotonic() + 60
    while True:
        try:
            return action()
        except BufferUnavailable:
            assert time.monotonic() < deadline


@pytest.mark.parametrize("server", ["bundled"], indirect=True)
@pytest.mark.parametrize(("kind", "case"), parameters(most=1, slow=[AsyncBuffer]))
def test_a_server_that_is_slow_within_the_timeout_just_works(new_world, kind, case):
    with new_world(kind) as world:
        expected = world.play(case)
    with new_world(kind) as world:
        action = world.arrange(case)
        world.proxies[0].delay = 0.03
        assert (action(), world.state()) == expected


@pytest.mark.parametrize("server", ["bundled"], indirect=True)
@pytest.mark.parametrize(("kind", "case"), parameters(most=1, slow=[AsyncBuffer]))
def test_a_call_that_takes_longer_than_the_timeout_is_unavailable_and_can_be_repeated(new_world, server, kind, case):
    if case is reserve:
        return  # its repetition is another one; the slot that nobody received expires
    with new_world(kind) as world:
        _, expected = world.play(case)
    with new_world(kind, timeout_seconds=0.05) as world:
        action = until_it_answers(lambda: world.arrange(case))
        with stopped(server), pytest.raises(BufferUnavailable, match=r"no answer from Redis at .* \(TimeoutError"):
            action()
        # The server now executes what it was asked and gave no answer to, four times.
        until_it_answers(action)
        assert world.state() == expected


def test_the_embedded_server_takes_a_memory_bound(tmp_path):
    with EmbeddedRedis(tmp_path, max_memory=123 << 20) as server, redis.Redis.from_url(server.admin_url) as raw:
        assert raw.config_get("maxmemory") == {"maxmemory": str(123 << 20)}
