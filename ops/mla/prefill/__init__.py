"""`mla_prefill` in its forms: computes keys and values from the latents, then attends to them."""
