"""The ops of multi-head latent attention."""
