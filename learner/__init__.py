"""The learner: leases batches of trajectories, trains with sharded JAX, publishes weights."""
