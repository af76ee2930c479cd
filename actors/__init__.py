"""Everything that makes experience: chat format, environments, episodes, rollout workers, samplers."""
