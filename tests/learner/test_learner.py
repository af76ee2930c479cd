"""The learner with a real buffer; a thread stands where the rollout workers are."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from buffer import NOT_SAMPLED, AsyncBuffer, Buffer, EmbeddedRedis, Limits, Status, Trajectory, WaitTimeout
from learner.agreement import EXACT, AgreementMonitor, DisagreementError, measure
from learner.checkpoints import Checkpoints
from learner.critic import Critic
from learner.gang import Gang
from learner.learner import Learner
from learner.models.config import ModelError
from learner.models.lora import Lora
from learner.models.value_head import read_value_head, with_value_head
from learner.models.weights import from_hf, initial_adapters, to_hf
from learner.objectives import (
    ESTIMATORS,
    decoupled_ppo,
    deferred_credit,
    grpo,
    k3,
    policy_objective,
    ppo_clip,
    token_mean,
    trajectory_credit,
)
from learner.packing import Example, Ladder, pack
from learner.publisher import Publisher
from learner.recipe import Recipe

GROUPS, GROUP_SIZE = 2, 4
SAMPLERS = ("here", "there")
ALONE = Gang()


@pytest.fixture(scope="module")
def redis(tmp_path_factory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server


class Actors:
    """Samples nonsense with the version last broadcast, and commits it."""

    def __init__(self, url: str, run: str) -> None:
        self.versions: list[int] = []
        self._url, self._run_name = url, run
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._work()))

    def __enter__(self) -> Actors:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)

    def broadcast(self, version: int, weights) -> None:
        self.versions.append(version)

    def fill(self, buffer: Buffer, groups: int) -> None:
        """Commit so many groups now, without the thread."""
        rng = np.random.default_rng(0)
        for _ in range(groups):
            slot = buffer.reserve("worker-0", 10.0)
            buffer.commit(*(self._trajectory(rng, slot.group, slot.task, i) for i in range(slot.group_size)))

    async def _work(self) -> None:
        buffer = AsyncBuffer(self._url, self._run_name, timeout_seconds=10.0)
        rng = np.random.default_rng(0)
        while not self._stop.is_set():
            try:
                slot = await buffer.reserve("worker-0", 0.1)
            except WaitTimeout:
                continue
            for index in range(slot.group_size):
                await buffer.commit(self._trajectory(rng, slot.group, slot.task, index))
        await buffer.close()

    def _trajectory(self, rng: np.random.Generator, group: str, task: int, index: int) -> Trajectory:
        size = int(rng.integers(4, 20))
        mask = np.arange(size) % 3 == 1
        reward = float(index % 2) if task % 3 else 1.0  # every third group is of equal rewards
        return Trajectory(
            tokens=rng.integers(0, 23, size, dtype=np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -3.0, 0.0).astype(np.float32),
            versions=np.where(mask, self.versions[-1], NOT_SAMPLED).astype(np.int32),
            rewards=np.array([0.0] * (mask.sum() - 1) + [reward], np.float32),
            reward=reward,
            status=Status.COMPLETED,
            task=task,
            group=group,
            index=index,
            sampler=SAMPLERS[index % 2],
            metadata={"success": bool(reward)},
        )


@pytest.fixture
def run(redis, tmp_path, model, params, ladder, make_step, request):
    """Makes actors, their buffer, and learners of one run."""
    name = request.node.name.translate(str.maketrans("[]", "--"))

    class Run:
        def __init__(self) -> None:
            self.buffer = Buffer(redis.url, name, timeout_seconds=10.0)
            self.actors = Actors(redis.url, name)

        def open(self, max_staleness: int) -> None:
            self.buffer.open(
                Limits(
                    max_staleness=max_staleness,
                    max_age_seconds=600.0,
                    groups_per_batch=GROUPS,
                    group_size=GROUP_SIZE,
                    max_bytes=1 << 24,
                    slot_seconds=30.0,
                    max_attempts=3,
                )
            )

        def learner(
            self, step=None, *, start=params, batch_timeout_seconds: float = 60.0, anchors=(), critic=None, gang=ALONE,
            adapters=None, agreement=None, **recipe,
        ) -> Learner:  # fmt: skip
            credit, step = partial(trajectory_credit, advantage=grpo), step or make_step()
            monitor = agreement and AgreementMonitor(
                step, EXACT, max_staleness=2, sampler_name=SAMPLERS.__getitem__, **agreement
            )
            return Learner(
                step,
                start,
                ladder=ladder,
                recipe=Recipe(
                    **{"credit": credit, "divisor_of": token_mean().divisor_of, "sampler_number": SAMPLERS.index}
                    | recipe
                ),
                anchors=anchors,
                critic=critic,
                agreement=monitor,
                gang=gang,
                buffer=self.buffer,
                publisher=Publisher(self.actors.broadcast, attempts=1, backoff_seconds=0.1, timeout_seconds=30.0),
                checkpoints=Checkpoints(tmp_path / "checkpoints", model, keep=2, adapters=adapters),
                checkpoint_every_steps=3,
                batch_timeout_seconds=batch_timeout_seconds,
                outage_seconds=30.0,
            )

    made = Run()
    yield made
    made.buffer.close()


AGES = ("0", "1", "2", "3", "4_or_more")

RECORD = {
    "step",
    "version",
    "loss",
    "reward_mean",
    "success_mean",
    "staleness_mean",
    "staleness_max",
    "tokens",
    "trained_tokens",
    "trajectories",
    "leases",
    "masked_trajectories",
    "idle_seconds",
    "step_seconds",
    "publish_seconds",
    "learner_idle_fraction",
    "grad_norm",
    "learning_rate",
    "entropy",
    "ratio_mean",
    "ratio_max",
    "ratio_outside_fraction",
    "effective_sample_size",
    "clip_low_fraction",
    "clip_high_fraction",
    "kl_k1",
    "kl_k3",
    *(f"kl_k1_staleness_{age}" for age in AGES),
    *(f"kl_k3_staleness_{age}" for age in AGES),
    *(f"tokens_staleness_{age}" for age in AGES),
    "zero_variance_groups",
    "skipped_tokens",
    "padding_fraction",
    "compilations_after_warmup",
}


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_run_trains_publishes_and_accounts_for_every_group(run, max_staleness, skips) -> None:
    run.open(max_staleness)
    learner, records = run.learner(uninformative="skip" if skips else "train"), []
    learner.start()
    assert run.actors.versions == [0]
    with run.actors:
        learner.run(5, threading.Event(), records.append)
    learner.close()
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert [record["version"] for record in records] == [0, 1, 2, 3, 4]
    assert run.actors.versions == [0, 1, 2, 3, 4, 5]
    assert all(set(record) == RECORD for record in records)
    assert all(record["compilations_after_warmup"] == 0 for record in records)
    assert all(0 <= record["staleness_max"] <= max_staleness for record in records)
    assert all(record["trajectories"] == GROUPS * GROUP_SIZE for record in records)
    assert all(0 <= record["learner_idle_fraction"] < 1 for record in records)
    assert {record["zero_variance_groups"] for record in records} == {0, 1}
    for record in records:  # what was left out is counted, and it is the groups of equal rewards
        assert (record["skipped_tokens"] > 0) == (skips and record["zero_variance_groups"] > 0)
        sampled = record["trained_tokens"] + record["skipped_tokens"]
        assert record["tokens"] / 4 < sampled < record["tokens"] / 2, "the mask has every third token"
    if max_staleness == 0:  # all that is trained was sampled by the very version being trained
        assert all(record["tokens_staleness_0"] == record["trained_tokens"] > 0 for record in records)
    stats = run.buffer.stats()
    assert (stats.version, stats.counters["acked"], stats.leased, stats.unaccounted) == (5, 5 * GROUPS, 0, 0)


def test_a_refilled_batch_is_full_of_informative_groups_and_every_leased_group_is_acked_once(run) -> None:
    run.open(2)
    learner, records = run.learner(uninformative="refill", extra_leases=2), []
    learner.start()
    with run.actors:
        learner.run(5, threading.Event(), records.append)
    learner.close()
    leases = [int(record["leases"]) for record in records]
    assert set(leases) <= {1, 2, 3} and max(leases) > 1, "no batch was refilled: the test shows nothing"
    for record in records:
        assert record["leases"] * GROUPS - record["zero_variance_groups"] >= GROUPS
        assert record["trajectories"] == record["leases"] * GROUPS * GROUP_SIZE
        assert 0 <= record["staleness_max"] <= 2
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    versions = np.cumsum([0, *leases]).tolist()  # a step raises the version by its leases
    assert [record["version"] for record in records] == versions[:-1]
    assert run.actors.versions == versions
    stats = run.buffer.stats()
    assert (stats.version, stats.leased, stats.unaccounted) == (versions[-1], 0, 0)
    assert stats.counters["acked"] == GROUPS * sum(leases)
    again = run.learner()
    again.start()
    again.close()
    assert (again.step, again.version) == (5, versions[-1] + 1)


def test_a_stop_gives_back_all_leases_of_a_batch_that_waits_to_be_refilled(run) -> None:
    run.open(2)
    learner, stop = run.learner(uninformative="refill", extra_leases=2), threading.Event()
    learner.start()
    run.actors.fill(run.buffer, GROUPS)  # only as many groups as one lease, and the first says nothing
    stop_soon = threading.Timer(1.0, stop.set)
    stop_soon.start()
    learner.run(1, stop, lambda record: pytest.fail("the batch was never full"))
    stop_soon.join()
    learner.close()
    stats = run.buffer.stats()
    assert (stats.leased, stats.ready, stats.unaccounted) == (0, GROUPS, 0)


def test_a_crash_between_the_acks_of_a_refilled_batch_loses_no_group(run) -> None:
    run.open(4)
    learner = run.learner()
    learner.start()
    run.actors.fill(run.buffer, 2 * GROUPS)
    epoch = run.buffer.begin_epoch()
    first, second = (run.buffer.lease(epoch, version, 10.0) for version in (0, 1))
    assert not set(first.group_ids) & set(second.group_ids)
    run.buffer.announce(epoch, 2)
    run.buffer.ack(first, 2)  # and no more: the learner died
    stats = run.buffer.stats()
    assert (stats.version, stats.leased, stats.counters["acked"]) == (2, GROUPS, GROUPS)
    again = run.learner()
    again.start()
    stats = run.buffer.stats()
    assert (stats.leased, stats.ready, stats.unaccounted) == (0, 2 * GROUPS, 0)
    for one in (learner, again):
        one.close()


def test_the_policies_that_the_objective_compares_with_are_scored_before_each_step(run, make_step) -> None:
    run.open(2)
    loss = partial(decoupled_ppo, proximal="recomputed")
    objective = partial(policy_objective, loss=loss, aggregation=token_mean(), divergence=k3, divergence_weight=0.1)
    anchors, records = ("proximal", "reference"), []
    learner = run.learner(make_step(objective), anchors=anchors, uninformative="train")
    learner.start()
    with run.actors:
        learner.run(4, threading.Event(), records.append)
    learner.close()
    assert all(record["compilations_after_warmup"] == 0 for record in records)
    assert abs(records[0]["kl_reference"]) < 1e-6, "the first policy is the reference"
    assert all(record["kl_reference"] > 1e-4 for record in records[1:])
    assert all(record["clip_low_fraction"] == record["clip_high_fraction"] == 0 for record in records)


@pytest.mark.parametrize("advantage", ["gae", "vtrace"])
def test_a_value_head_is_trained_and_kept_and_needs_no_spread_of_rewards(
    run, tmp_path, model, params, make_step, advantage
) -> None:
    run.open(2)
    step = make_step(
        partial(policy_objective, loss=ppo_clip, aggregation=token_mean(), value_weight=0.5), value_gradient="trunk"
    )
    settings = {"discount": 0.9, "decay": 0.9} | ({"is_weighted": False} if advantage == "vtrace" else {})
    critic = Critic(step.mesh, partial(ESTIMATORS[advantage], **settings), normalise=True)

    def learner():
        start = with_value_head(params, read_value_head(model, tmp_path))
        return run.learner(step, start=start, anchors=("proximal",), critic=critic, credit=deferred_credit)

    first, records = learner(), []
    first.start()
    with run.actors:
        first.run(4, threading.Event(), records.append)
    first.close()
    assert all(set(record) == RECORD | {"value_loss", "value_mean", "explained_variance"} for record in records)
    assert all(record["compilations_after_warmup"] == record["zero_variance_groups"] == 0 for record in records)
    assert records[0]["value_mean"] == 0 and all(record["value_mean"] != 0 for record in records[1:])
    again = learner()
    again.start()
    again.close()
    for name in ("weight_H", "bias"):
        kept, had = (np.asarray(one.params["value_head"][name][...]) for one in (again, first))
        np.testing.assert_array_equal(kept, had)
        assert had.any()


def test_a_critic_without_values_is_refused(run, make_step) -> None:
    critic = Critic(make_step().mesh, partial(ESTIMATORS["gae"], discount=1.0, decay=1.0), normalise=True)
    with pytest.raises(ValueError, match="expected 'proximal' among them"):
        run.learner(critic=critic)


def test_adapters_are_trained_published_merged_and_resumed(run, make_step, model, params) -> None:
    run.open(2)
    lora, published = Lora(4, 8.0, ("q_proj", "down_proj")), {}
    objective = partial(policy_objective, loss=ppo_clip, aggregation=token_mean(), divergence=k3, divergence_weight=0.1)
    step = make_step(objective, lora=lora)
    step.freeze(params)
    fresh = initial_adapters(model, lora, seed=0)
    broadcast, records = run.actors.broadcast, []

    def keep(version: int, weights) -> None:
        published[version] = weights
        broadcast(version, weights)

    run.actors.broadcast = keep
    settings = {
        "anchors": ("reference",),
        "adapters": {"rank": 4, "base_sha256": "abc"},
        "agreement": {"every_steps": 1},
    }
    learner = run.learner(step, start=fresh, **settings)
    learner.start()
    with run.actors:
        learner.run(3, threading.Event(), records.append)
    learner.close()
    assert abs(records[0]["kl_reference"]) < 1e-6, "the reference is the frozen model"
    assert records[-1]["kl_reference"] > 1e-4
    assert all(record["compilations_after_warmup"] == 0 for record in records)
    trained, merged = jax.device_get(learner.trained), to_hf(model, learner.params)
    for name, tensor in to_hf(model, params).items():
        np.testing.assert_array_equal(published[0][name], tensor, err_msg=name)
        np.testing.assert_array_equal(published[3][name], merged[name], err_msg=name)
        assert ("q_proj" in name or "down_proj" in name) == (merged[name] != tensor).any(), name

    again = run.learner(step, start=fresh, **settings)
    again.start()
    assert again.step == 3
    for ours, theirs in zip(jax.tree.leaves(again.trained), jax.tree.leaves(trained), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    again.close()
    for other, difference in (
        ({"rank": 8, "base_sha256": "abc"}, "adapters.rank is 4, the run's is 8"),
        ({"rank": 4, "base_sha256": "abd"}, "adapters.base_sha256 is 'abc', the run's is 'abd'"),
        (None, r"adapters is {.*}, the run's is None"),
    ):
        refused = run.learner(step, start=fresh, anchors=("reference",), adapters=other)
        with pytest.raises(ModelError, match=f"is of another model: {difference}; use the model"):
            refused.start()
        refused.close()


def test_a_stopped_run_saves_and_goes_on_with_the_next_version(run) -> None:
    run.open(2)
    learner, stop = run.learner(), threading.Event()
    records: list[dict[str, float]] = []

    def stop_after_two(record: dict[str, float]) -> None:
        records.append(record)
        if record["step"] == 2:
            stop.set()

    learner.start()
    with run.actors:
        learner.run(100, stop, stop_after_two)
        learner.close()
        assert len(records) == 2
        stats = run.buffer.stats()
        assert (stats.version, stats.leased, stats.counters["acked"]) == (2, 0, 2 * GROUPS)
        again = run.learner()
        again.start()
        assert run.actors.versions == [0, 1, 2, 3]
        assert (again.step, again.version, run.buffer.version()) == (2, 3, 3)
        again.run(3, threading.Event(), records.append)
        again.close()
    assert [(record["step"], record["version"]) for record in records] == [(1, 0), (2, 1), (3, 3)]


def test_a_version_that_samplers_may_hold_is_never_given_to_other_weights(run) -> None:
    run.open(2)
    learner = run.learner()
    learner.start()
    learner.close()
    run.buffer.announce(1, 1)  # as a learner does that dies while it hands out version 1
    again = run.learner()
    again.start()
    again.close()
    assert again.version == run.buffer.version() == 2


def test_a_stop_ends_the_wait_for_a_batch(run) -> None:
    run.open(0)
    learner, stop = run.learner(), threading.Event()
    learner.start()
    stop_soon = threading.Timer(0.2, stop.set)
    stop_soon.start()
    learner.run(1, stop, lambda record: pytest.fail("nothing was there to train on"))
    stop_soon.join()
    learner.close()


def test_without_actors_the_wait_ends_and_says_what_is_missing(run) -> None:
    run.open(0)
    learner = run.learner(batch_timeout_seconds=0.1)
    learner.start()
    with pytest.raises(WaitTimeout, match="the learner waits for the rollout workers"):
        learner.run(1, threading.Event(), lambda record: None)
    learner.close()


def test_a_gang_cannot_refill_batches(run) -> None:
    with pytest.raises(ValueError, match="'refill' in a gang of 2 processes"):
        run.learner(uninformative="refill", extra_leases=1, gang=Gang(0, 2))


def test_a_gang_cannot_compare_with_the_mean_of_the_batch(run) -> None:
    with pytest.raises(ValueError, match="mean of the batch in a gang of 2 processes"):
        run.learner(compares_batch=True, gang=Gang(0, 2))


class Scoring(Actors):
    """Commits a batch for every version, with log-probabilities of that version but for what a fault does to them.

    The first version gets two batches, so that all that follow are trained one version late.
    """

    def __init__(self, buffer: Buffer, model, step, faulty, fault: str | None) -> None:
        self.versions: list[int] = []
        self.log_ratios: dict[int, list[np.ndarray]] = {}
        self._buffer, self._model, self._step, self._faulty, self._fault = buffer, model, step, faulty, fault

    def broadcast(self, version: int, weights) -> None:
        spoiled = dict(weights)
        if self._fault == "weights":
            spoiled["model.layers.0.mlp.down_proj.weight"] = weights["model.layers.0.mlp.down_proj.weight"] * 1.5
        self._params = from_hf(self._model, dict(weights), self._step.shardings)
        self._spoiled = from_hf(self._model, spoiled, self._step.shardings)
        super().broadcast(version, weights)
        if version:
            self.fill(self._buffer, GROUPS)
        else:  # before the learner counts compilations
            for step in (self._step, self._faulty):
                self._score(step, self._params, np.zeros(4, np.int32))

    def _trajectory(self, rng: np.random.Generator, group: str, task: int, index: int) -> Trajectory:
        made = super()._trajectory(rng, group, task, index)
        right = self._score(self._step, self._params, made.tokens)
        is_faulty = self._fault == "temperature" and index % 2
        said = self._score(self._faulty if is_faulty else self._step, self._spoiled, made.tokens)
        mask, version = made.loss_mask, self.versions[-1]
        self.log_ratios.setdefault(version, []).append((right - said)[mask])
        return replace(made, logprobs=np.where(mask, said, 0.0).astype(np.float32))

    def _score(self, step, params, tokens: np.ndarray) -> np.ndarray:
        nothing = np.zeros(len(tokens), np.int32)
        [rows] = pack([Example(tokens, nothing > 0, nothing, nothing, nothing)], Ladder(((4, 32),)))
        return np.pad(np.asarray(step.logprobs(params, step.put(rows)).logprob)[0, : len(tokens) - 1], (1, 0))


@pytest.mark.parametrize("fault", [None, "temperature", "weights"])
def test_stale_tokens_are_compared_with_the_weights_that_sampled_them(run, model, make_step, fault) -> None:
    run.open(2)
    step = make_step()
    run.actors = Scoring(run.buffer, model, step, make_step(temperature=0.7), fault)
    learner, records = run.learner(step, agreement={"every_steps": 1}, uninformative="train"), []
    learner.start()
    run.actors.fill(run.buffer, 2 * GROUPS)
    learner.run(6, threading.Event(), records.append)
    learner.close()
    assert all(record["compilations_after_warmup"] == 0 for record in records)
    assert all(record["staleness_max"] == 1 and record["tokens_staleness_0"] == 0 for record in records[1:])
    checked = [record for record in records if "agreement_version" in record]
    assert [(record["step"], record["agreement_version"]) for record in checked] == [(3, 0), (6, 3)]
    for record in checked:  # with fewer tokens than are enough, a check takes all that may come
        expected = measure(np.concatenate(run.actors.log_ratios[record["agreement_version"]]))
        for name, value in expected._asdict().items():
            assert record[f"agreement_{name}"] == pytest.approx(value, rel=1e-3, abs=1e-5), name
        if fault is None:
            assert record["agreement_max"] < 1e-5 and "agreement_alarm" not in record
            continue
        alarm = record["agreement_alarm"]
        assert f"version {record['agreement_version']}: the mean difference is {expected.mean:.2g} nats, more" in alarm
        assert f"than 0.001 (learner.agreement.max_mean), over {expected.tokens} tokens" in alarm and "\n" not in alarm
        blames_one = re.search(r"; it is there \(\S+ nats\); others that agree: 1\. Check", alarm)
        blames_both = re.search(r"; sampled by here \(\S+ nats\), there \(\S+ nats\)", alarm)
        assert blames_one if fault == "temperature" else blames_both, alarm


def test_a_disagreement_ends_the_run_where_it_is_told_to_and_the_steps_made_are_saved(run, model, make_step) -> None:
    run.open(2)
    step = make_step()
    run.actors = Scoring(run.buffer, model, step, make_step(temperature=0.7), "temperature")
    learner, records = run.learner(step, agreement={"every_steps": 1, "on_alarm": "stop"}, uninformative="train"), []
    learner.start()
    run.actors.fill(run.buffer, 2 * GROUPS)
    with pytest.raises(DisagreementError, match="sampler and learner disagree about version 0"):
        learner.run(6, threading.Event(), records.append)
    learner.close()
    assert [record["step"] for record in records] == [1, 2, 3] and "agreement_alarm" in records[-1]
    again = run.learner(step)
    again.start()
    again.close()
    assert again.step == 3
