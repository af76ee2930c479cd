"""What users and failing networks do to the buffer: a clear error, or no effect at all."""

import asyncio
import socket

import pytest
import redis
from buffer_examples import complete, limits, trajectory
from cutting_proxy import Proxy

from buffer import AsyncBuffer, Buffer, BufferFull, BufferUnavailable, Commit, EmbeddedRedis


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


@pytest.mark.parametrize("moment", ["before", "after"])
def test_every_call_survives_the_loss_of_its_connection(server, run, call, moment):
    proxy = Proxy(server.port)
    url = server.url.replace(f":{server.port}/", f":{proxy.port}/")
    buffer = Buffer(url, run, timeout_seconds=5)
    workers = AsyncBuffer(url, run, timeout_seconds=5)
    cuts = 0

    def cut(action):
        nonlocal cuts
        proxy.cut(moment)
        result = action()
        cuts += 1
        assert proxy.cuts == cuts
        return result

    cut(lambda: buffer.open(limits(max_staleness=2)))
    epoch = cut(buffer.begin_epoch)
    cut(lambda: buffer.advance(epoch, 1))
    slots = [cut(lambda: call(workers.reserve("worker", timeout=0))) for _ in range(4)]
    assert [slot.task for slot in slots] == [0, 1, 2, 3]
    for slot in slots[:3]:
        assert cut(lambda: call(workers.renew(slot.group)))  # noqa: B023 - called at once
        for index in range(2):
            example = trajectory(slot.group, index, version=1)
            answer = cut(lambda: call(workers.commit(example)))  # noqa: B023
            assert answer is (Commit.DUPLICATE if moment == "after" else Commit.ACCEPTED)
    cut(lambda: call(workers.abandon(slots[3].group, "timeout")))
    lease = cut(lambda: buffer.lease(epoch, 1, timeout=0))
    cut(lambda: buffer.release(lease))
    lease = cut(lambda: buffer.lease(epoch, 1, timeout=0))
    assert lease.group_ids == [slot.group for slot in slots[:2]]
    cut(lambda: buffer.ack(lease, 2))
    stats = cut(buffer.stats)
    counters = {name: value for name, value in stats.counters.items() if value and name != "redelivered"}
    assert counters == {"reserved": 4, "acked": 2, "abandoned": 1, "abandoned:timeout": 1}
    assert (stats.version, stats.ready, stats.unaccounted) == (2, 1, 0)
    call(workers.close())
    buffer.close()
    proxy.close()


def test_a_full_store_is_back_pressure_and_acks_empty_it(tmp_path):
    with (
        EmbeddedRedis(tmp_path) as server,
        redis.Redis.from_url(server.url) as raw,
        asyncio.Runner() as runner,
    ):
        buffer = Buffer(server.url, "x", timeout_seconds=5)
        workers = AsyncBuffer(server.url, "x", timeout_seconds=5)
        buffer.open(limits(max_staleness=9, groups_per_batch=1))
        epoch = buffer.begin_epoch()
        runner.run(complete(workers))
        slot = runner.run(workers.reserve("worker", timeout=0))

        raw.config_set("maxmemory", 1)
        with pytest.raises(BufferFull, match=r"lower buffer\.max_bytes"):
            runner.run(workers.commit(trajectory(slot.group, 0)))
        buffer.open(limits(max_staleness=9, groups_per_batch=1))
        assert runner.run(workers.renew(slot.group))
        epoch = buffer.begin_epoch()
        buffer.ack(buffer.lease(epoch, 0, timeout=0), 1)
        buffer.advance(epoch, 1)
        stats = buffer.stats()
        assert (stats.version, stats.reserved, stats.outstanding, stats.unaccounted) == (1, 1, 1, 0)

        raw.config_set("maxmemory", 0)
        assert runner.run(workers.commit(trajectory(slot.group, 0, version=1))) is Commit.ACCEPTED
        runner.run(workers.close())
        buffer.close()


def test_the_embedded_server_takes_a_memory_bound(tmp_path):
    with EmbeddedRedis(tmp_path, max_memory=123 << 20) as server, redis.Redis.from_url(server.url) as raw:
        assert raw.config_get("maxmemory") == {"maxmemory": str(123 << 20)}
