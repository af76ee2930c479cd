"""The policy that training starts from: an existing checkpoint folder, or a new model, warm-started if asked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import ray

from actors.chat import Chat
from cluster.config import Config
from cluster.conversations import load_conversations
from cluster.display import Display
from cluster.monitor import ANSWER_SECONDS
from cluster.ray_runtime import local_ray
from cluster.runfolder import RunFolder
from cluster.services import START_SECONDS, start_learner, wait_for

WARM_START_SECONDS = 24 * 3600.0
"""Longest that a warm start may take."""


def prepare_policy(config: Config, folder: RunFolder, display: Display, watch: Callable[[], None]) -> Path:
    """The Hugging Face folder of the policy at step 0, made if this run has none yet.

    Args:
        config: the ``model`` section says what to start from.
        folder: a new model is written to its ``initial_model``.
        display: shows the warm start.
        watch: called twice a second; what it raises ends the work.

    Raises:
        ConfigError: the conversations cannot be used.
    """
    settings = config.model
    if settings.path is not None and settings.warm_start is None:
        return settings.path
    target = folder.initial_model
    if target.is_dir():
        return target
    # Nothing else runs yet, so on a Ray of our own the warm start may use every core; its process ends with it.
    learner = start_learner(config, folder.name, role="warm-start", threads=os.cpu_count() if local_ray() else None)
    try:
        wait_for([learner.poll.remote()], watch, seconds=START_SECONDS, whom="the learner")
        source = settings.path
        if source is None:
            source = folder.root / "new_model"
            making = learner.make_model.remote(settings.architecture, source)
            wait_for([making], watch, seconds=START_SECONDS, whom="the learner")
        if settings.warm_start is None:
            source.rename(target)
            return target
        display.phase("warm start: imitating conversations", settings.warm_start.steps)
        conversations = load_conversations(config, settings.warm_start, Chat(source))
        imitation = learner.imitate.remote(source, target, conversations)

        def show() -> None:
            watch()
            for record in ray.get(learner.poll.remote(), timeout=ANSWER_SECONDS):
                folder.append_metrics("warm_start", record)
                display.progress(int(record["step"]), f"loss {record['loss']:.3f}")

        wait_for([imitation], show, seconds=WARM_START_SECONDS, whom="the warm start")
        show()
        if settings.path is None:
            shutil.rmtree(source)
        return target
    finally:
        ray.kill(learner)
