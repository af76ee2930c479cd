"""What a training step would cost on a TPU slice, from programs compiled for it on a machine that has none."""
