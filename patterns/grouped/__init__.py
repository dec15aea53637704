"""Pattern `grouped_gemm`."""
