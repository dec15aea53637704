"""Turns a kernel specification into a standalone Triton file, a cubin and its audit."""
