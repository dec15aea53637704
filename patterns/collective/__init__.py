"""Pattern `all_reduce_residual_norm`."""
