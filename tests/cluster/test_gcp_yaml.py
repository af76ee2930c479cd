import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema.exceptions import ValidationError
from ray._private.accelerators import TPUAcceleratorManager, tpu
from ray.autoscaler._private.util import prepare_config, validate_config

PATH = Path(__file__).parent.parent.parent / "cluster" / "gcp-tpu.yaml"
ROOT = PATH.parent.parent


def cluster() -> dict[str, Any]:
    return yaml.safe_load(PATH.read_text())


def prepared(config: dict[str, Any]) -> dict[str, Any]:
    whole = prepare_config(copy.deepcopy(config))
    validate_config(whole)
    return whole


def test_ray_accepts_the_cluster():
    kinds = prepared(cluster())["available_node_types"]
    assert set(kinds) == {"head", "actors", "tpu_v6e_8"}


@pytest.mark.parametrize(
    ("change", "error"),
    [({"max_worker": 3}, ValidationError), ({"head_node_type": "nobody"}, ValueError), ({"auth": 3}, ValidationError)],
)
def test_ray_refuses_a_cluster_with_a_mistake(change, error):
    with pytest.raises(error):
        prepared({**cluster(), **change})


def test_actors_scale_and_the_slice_is_there_from_the_start():
    kinds = cluster()["available_node_types"]
    assert kinds["head"]["resources"]["CPU"] == 0
    assert kinds["actors"]["min_workers"] < kinds["actors"]["max_workers"]
    assert kinds["tpu_v6e_8"]["min_workers"] == kinds["tpu_v6e_8"]["max_workers"] == 1
    assert cluster()["max_workers"] >= sum(kind.get("max_workers", 0) for kind in kinds.values())


def test_the_slice_is_one_host_with_all_its_chips():
    kind = cluster()["available_node_types"]["tpu_v6e_8"]
    accelerator = kind["node_config"]["acceleratorConfig"]
    rows, columns = (int(side) for side in accelerator["topology"].split("x"))
    name = f"{accelerator['type'].lower()}-{rows * columns * tpu.get_tpu_cores_per_chip(accelerator['type'].lower())}"
    assert TPUAcceleratorManager.is_valid_tpu_accelerator_type(name)
    assert kind["resources"]["TPU"] == rows * columns == tpu.get_num_tpu_visible_chips_per_host(name)


def test_every_ray_process_states_how_it_authenticates():
    config = cluster()
    starts = [
        line for name in ("head", "worker") for line in config[f"{name}_start_ray_commands"] if "ray start" in line
    ]
    assert len(starts) == 2
    assert all("RAY_AUTH_MODE=token ray start" in line for line in starts)
    assert "~/.ray/auth_token" in config["file_mounts"]
