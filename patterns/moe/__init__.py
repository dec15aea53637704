"""Pattern `moe`."""
