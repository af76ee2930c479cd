"""The policy that training starts from: an existing checkpoint folder, or a new model, warm-started if asked."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from actors.chat import Chat
from cluster.config import Config
from cluster.conversations import load_conversations
from cluster.display import Display
from cluster.learner_gang import LearnerGang
from cluster.monitor import ANSWER_SECONDS
from cluster.runfolder import RunFolder
from cluster.waiting import START_SECONDS, wait_for

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
    # Nothing else runs yet, so the warm start may use every core; its processes end with it.
    learner = LearnerGang(config, folder.name, role="warm-start", every_core=True)
    try:
        learner.join(watch)
        source = settings.path
        if source is None:
            assert settings.architecture is not None  # combinations see to it
            source = folder.root / "new_model"
            making = learner.make_model(settings.architecture, source)
            wait_for([making], watch, seconds=START_SECONDS, whom="the learner")
        if settings.warm_start is None:
            source.rename(target)
            return target
        display.phase("warm start: imitating conversations", settings.warm_start.steps)
        conversations = load_conversations(config, settings.warm_start, Chat(source))
        imitation = learner.imitate(source, target, conversations)

        def show() -> None:
            watch()
            for record in learner.poll(ANSWER_SECONDS):
                folder.append_metrics("warm_start", record)
                display.progress(int(record["step"]), f"loss {record['loss']:.3f}")

        wait_for(imitation, show, seconds=WARM_START_SECONDS, whom="the warm start")
        show()
        if settings.path is None:
            shutil.rmtree(source)
        return target
    finally:
        learner.kill()
