"""Sums over ranks, with the residual and norm after them: the kernel and its plan."""
