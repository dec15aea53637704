"""Lists the kernels of each family that are compiled with every supported release of Triton."""
