"""Patterns `mla_decode`, `mla_prefill` and `mla_latent_store`."""
