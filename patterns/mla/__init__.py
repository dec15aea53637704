"""Patterns `mla_prefill` and `mla_latent_store`."""
