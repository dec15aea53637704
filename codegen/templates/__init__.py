"""What the templates of several families share. Templates are ordinary Triton functions."""
