"""``python -m cluster`` is ``headrace``: what a submitted Ray job runs, where nothing of ours is installed."""

from cluster.cli import main

main()
