"""Multi-head latent attention: problems, specs, plans."""
