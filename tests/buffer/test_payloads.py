"""Payloads that are not as they should be: refused before they are stored, put aside when they are met."""

import pickle
import struct
from pathlib import Path

import pytest
from buffer_examples import complete, limits, trajectory
from xxhash import xxh3_64

from buffer import Commit, FormatError, State, encode


def payload_of(raw, run, group, index):
    """Name of the key that holds a member's bytes."""
    [name] = raw.keys(f"{{headrace:{run}}}:payload:{group}:{index}:*")
    return name


def sealed(payload):
    """Return ``payload`` with a checksum that is right."""
    digest = xxh3_64(payload[:24])
    digest.update(payload[32:])
    return payload[:24] + struct.pack("<Q", digest.intdigest()) + payload[32:]


def of_format(payload, number):
    return sealed(payload[:4] + struct.pack("<H", number) + payload[6:])


def announcing(payload, tokens):
    """A payload whose header announces so many tokens."""
    return sealed(payload[:8] + struct.pack("<I", tokens) + payload[12:])


class _Touches:
    """Creates the file ``path`` when it is unpickled."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return Path.touch, (self._path,)


DAMAGES = {
    "without its last bytes": lambda payload: payload[:-5],
    "shorter than a header": lambda payload: payload[:10],
    "empty": lambda payload: b"",
    "longer": lambda payload: payload + b"\0",
    "with a flipped bit": lambda payload: payload[:40] + bytes([payload[40] ^ 1]) + payload[41:],
    "of an older format": lambda payload: of_format(payload, 1),
    "of a newer format": lambda payload: of_format(payload, 3),
    "announcing 50 GB": lambda payload: announcing(payload, 0xFFFFFFFF),
    "of another member": lambda payload: encode(trajectory("another", 1)),
    "some text": lambda payload: b'{"reward": 1.0}',
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_payload_is_put_aside_and_the_batch_made_up(buffer, workers, call, raw, run, damage):
    buffer.open(limits(max_staleness=2, groups_per_batch=2))
    epoch = buffer.begin_epoch()
    slots = [call(complete(workers)) for _ in range(3)]
    name = payload_of(raw, run, slots[0].group, 1)
    damaged = damage(raw.get(name))
    raw.set(name, damaged)

    lease = buffer.lease(epoch, 0, timeout=0)

    assert lease.group_ids == [slots[1].group, slots[2].group]
    counters = buffer.stats().counters
    assert (counters["quarantined"], counters["lost"], buffer.stats().unaccounted) == (1, 0, 0)
    kept = {name: raw.get(name) for name in raw.keys(f"{{headrace:{run}}}:quarantine:*")}
    assert (len(kept), damaged in kept.values()) == (2, True)
    assert all(0 < raw.ttl(name) <= 24 * 3600 for name in kept)
    assert not raw.keys(f"{{headrace:{run}}}:payload:{slots[0].group}:*")
    assert call(workers.reserve("worker", timeout=0)).task == slots[0].task


def test_bytes_that_would_be_executed_by_pickle_are_not(buffer, workers, call, raw, run, tmp_path):
    buffer.open(limits(max_staleness=2, groups_per_batch=1))
    epoch = buffer.begin_epoch()
    slots = [call(complete(workers)) for _ in range(2)]
    trap = pickle.dumps(_Touches(tmp_path / "executed"))
    for index in range(2):
        raw.set(payload_of(raw, run, slots[0].group, index), trap)
    assert buffer.lease(epoch, 0, timeout=0).group_ids == [slots[1].group]
    assert buffer.stats().counters["quarantined"] == 1
    assert not (tmp_path / "executed").exists()
    pickle.loads(trap)  # the trap itself works
    assert (tmp_path / "executed").exists()


def test_peeking_at_a_payload_that_is_gone_or_damaged_says_so_and_changes_nothing(buffer, workers, call, raw, run):
    buffer.open(limits(groups_per_batch=1))
    gone, damaged = (call(complete(workers)) for _ in range(2))
    raw.delete(payload_of(raw, run, gone.group, 0))
    raw.append(payload_of(raw, run, damaged.group, 1), "x")
    for info, said in zip(buffer.groups(State.READY, 2), ["payload of member 0 .* is gone", "truncated"], strict=True):
        with pytest.raises(FormatError, match=said):
            buffer.peek(info, 0 if info.group == gone.group else 1)
    assert buffer.stats().ready == 2
    assert not raw.keys(f"{{headrace:{run}}}:quarantine:*")


def test_a_payload_over_the_limit_is_refused_and_nothing_of_its_commit_is_stored(
    buffer, workers, call, raw, run, monkeypatch
):
    buffer.open(limits())
    slot = call(workers.reserve("worker", timeout=0))
    small, large = trajectory(slot.group, 0), trajectory(slot.group, 1, tokens=1000)
    monkeypatch.setattr("buffer.payloads.MAX_PAYLOAD_BYTES", 5000)
    with pytest.raises(ValueError, match=rf"trajectory 1 of group {slot.group} has \d+ bytes; expected at most 5000"):
        buffer.commit(small, large)
    with pytest.raises(ValueError, match="make episodes or metadata shorter"):
        call(workers.commit(large))
    assert (raw.keys(f"{{headrace:{run}}}:payload:*"), buffer.stats().bytes) == ([], 0)
    assert call(workers.commit(small)) is Commit.ACCEPTED
