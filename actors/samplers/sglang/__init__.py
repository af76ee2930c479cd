"""SGLang: SGLang-Jax with its engine in our process (``sampler``), and any SGLang server over HTTP (``client``).

Nothing is imported here: whether the release fits is found out without loading JAX.
"""
