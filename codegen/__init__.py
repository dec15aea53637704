"""From a kernel specification to a standalone Triton file, a cubin and its audit."""
