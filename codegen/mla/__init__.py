"""Multi-head latent attention: the static facts of calls (problems), kernels and plans."""
