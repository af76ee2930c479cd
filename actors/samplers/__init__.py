"""Samplers: one contract, several implementations."""
