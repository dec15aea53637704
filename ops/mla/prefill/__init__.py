"""`mla_prefill` in its forms: keys and values are made of the latents, then attended to."""
