"""The one transformer, and what belongs to a checkpoint of it."""
