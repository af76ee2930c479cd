from pathlib import Path

import pytest

from actors.chat import Chat
from actors.tokenizers import write_character_tokenizer


@pytest.fixture(scope="session")
def character_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("characters")
    write_character_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def chat(character_folder: Path) -> Chat:
    return Chat(character_folder)
