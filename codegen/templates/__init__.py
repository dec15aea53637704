"""Templates that several families share. Templates are ordinary Triton functions."""
