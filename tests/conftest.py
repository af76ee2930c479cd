"""Settings of every test process; they must stand before JAX or Ray is imported, so nothing heavy is imported here."""

import os

from cluster.ray_runtime import set_ray_environment

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.pop("RAY_ADDRESS", None)  # a test never joins a cluster that happens to run on this machine
set_ray_environment()
