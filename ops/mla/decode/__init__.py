"""`mla_decode`: attention to the latents themselves."""
