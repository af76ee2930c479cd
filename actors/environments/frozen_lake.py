"""FrozenLake as text: the agent reads the map, answers with a move, and reads the new map.

An observation is the grid, one row a line: ``A`` agent, ``.`` ice, ``H`` hole, ``G`` goal::

    A...
    .H.H
    ...H
    H..G

An action is one letter of ``LDRU`` (left, down, right, up). Anything else leaves the agent
where it is and costs a turn; the next observation then starts with a line ``invalid``.

There are few small maps, so different seeds often give the same one. Maps, not seeds, are
therefore split into those for training and those held out for evaluation: see ``split``.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map
from gymnasium.spaces import Text

if TYPE_CHECKING:
    from actors.chat import Message

MOVES = "LDRU"
"""Letters in the order of FrozenLake's action numbers."""
INVALID = "invalid\n"
"""Starts the observation behind an action that is no move."""
SPLITS = ("all", "train", "evaluation")
"""Sets of maps to draw from; the last two share no map and together are the first."""
EVALUATION_SHARE = 5
"""One of this many maps is an evaluation map."""
_MOST_DRAWS = 1000


class FrozenLakeText(gymnasium.Env[str, str]):
    """Gymnasium's ``FrozenLake-v1``, not slippery, on a fresh map per seed, read and played as text."""

    def __init__(
        self, size: int = 4, p: float = 0.8, split: str = "all", reward_schedule: Sequence[int] = (1, 0, 0)
    ) -> None:
        """Play on ``size`` x ``size`` maps whose cells are ice with probability ``p``.

        Args:
            size: rows and columns.
            p: probability of ice.
            split: maps to draw from, one of ``SPLITS``. The text of a map decides to which it belongs, so no map of
                ``train`` is one of ``evaluation``, whatever the seeds.
            reward_schedule: rewards of reaching the goal, a hole and ice, as in FrozenLake.

        Raises:
            ValueError: no map has this shape, or none of this shape is in the split.
        """
        if size < 2 or not 0 < p <= 1:
            raise ValueError(f"FrozenLakeText got size={size}, p={p}; expected size of at least 2 and 0 < p <= 1")
        if split not in SPLITS:
            raise ValueError(f"FrozenLakeText got split={split!r}; expected one of {', '.join(SPLITS)}")
        if len(reward_schedule) != 3:
            raise ValueError(
                f"FrozenLakeText got reward_schedule={list(reward_schedule)}; "
                "expected three rewards: of the goal, a hole and ice"
            )
        self._size = size
        self._p = p
        goal, hole, ice = reward_schedule
        self._rewards = (goal, hole, ice)
        self._split = split
        self._draw(seed=0)  # fails here rather than in every episode if the split has no map
        longest = len(INVALID) + size * (size + 1) - 1
        self.observation_space = Text(longest, charset=".AGH" + INVALID)
        self.action_space = Text(1, charset=MOVES)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start on the map of ``seed``; without one, on the next map of the environment's own generator."""
        super().reset(seed=seed, options=options)
        map_seed = int(self.np_random.integers(2**31)) if seed is None else seed
        board = self._draw(map_seed)
        # A map is part of FrozenLakeEnv's transition table, so a new map is a new (cheap) FrozenLakeEnv.
        self._lake = FrozenLakeEnv(desc=board, is_slippery=False, reward_schedule=self._rewards)
        self._cells = "".join(board).replace("S", ".").replace("F", ".")
        self._position, _ = self._lake.reset(seed=seed)
        return self._grid(), {"success": False, "invalid_move": False}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play the move ``action``; blanks around the letter do not matter."""
        letter = action.strip()
        if len(letter) != 1 or letter not in MOVES:
            return INVALID + self._grid(), 0.0, False, False, {"success": False, "invalid_move": True}
        self._position, reward, terminated, truncated, _ = self._lake.step(MOVES.index(letter))
        success = self._cells[self._position] == "G"
        return self._grid(), float(reward), terminated, truncated, {"success": success, "invalid_move": False}

    def moves_straight(self) -> str:
        """The moves that keep the agent on the straight line to the goal; holes are not looked at."""
        row, column = divmod(self._position, self._size)
        goal_row, goal_column = divmod(self._cells.index("G"), self._size)
        down, right = goal_row - row, goal_column - column  # never negative: the goal is the last cell
        return "D" * (down >= right) + "R" * (right >= down)

    def _draw(self, seed: int) -> list[str]:
        """The map of ``seed``: for a split the first in it among the maps of seeds that ``seed`` gives."""
        if self._split == "all":
            return generate_random_map(self._size, self._p, seed)
        seeds = np.random.default_rng(seed)
        for _ in range(_MOST_DRAWS):
            board = generate_random_map(self._size, self._p, int(seeds.integers(2**31)))
            # A checksum, because Python's own hash of a text differs between processes.
            held_out = zlib.crc32("\n".join(board).encode()) % EVALUATION_SHARE == 0
            if held_out == (self._split == "evaluation"):
                return board
        raise ValueError(
            f"FrozenLakeText found no {self._split} map of size={self._size}, p={self._p} in {_MOST_DRAWS} draws; "
            "expected more different maps: raise size, or lower p"
        )

    def _grid(self) -> str:
        cells = list(self._cells)
        cells[self._position] = "A"
        return "\n".join("".join(cells[i : i + self._size]) for i in range(0, len(cells), self._size))


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One played episode as a conversation.

    Attributes:
        messages: alternating user (observation) and assistant (move) messages; the last is a move.
        success: whether the goal was reached.
    """

    messages: list[Message]
    success: bool


def demonstrate(
    seed: int,
    kwargs: Mapping[str, Any],
    *,
    noise: float,
    rng: np.random.Generator,
    max_turns: int,
    system_prompt: str | None = None,
) -> Demonstration:
    """Let a hasty walker play one episode in the real environment: it heads straight for the goal and sees no holes.

    Who imitates it learns how moves are written and where the goal lies. What a hole is, it has to find out itself.

    Args:
        seed: chooses the map, as ``reset`` does.
        kwargs: arguments of ``FrozenLakeText``.
        noise: probability with which each move is replaced by a uniformly random one, 0 to 1.
        rng: source of that noise, and of the choice between two moves towards the goal.
        max_turns: the episode ends after this many moves, at least 1.
        system_prompt: text of a first system message; None for none.
    """
    environment = FrozenLakeText(**kwargs)
    messages: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt is not None else []
    observation, info = environment.reset(seed=seed)
    for _ in range(max_turns):
        moves = MOVES if rng.random() < noise else environment.moves_straight()
        move = moves[rng.integers(len(moves))]
        messages += [{"role": "user", "content": observation}, {"role": "assistant", "content": move}]
        observation, _, terminated, truncated, info = environment.step(move)
        if terminated or truncated:
            break
    return Demonstration(messages, bool(info["success"]))
