"""Sums over ranks, with the residual and norm after them: problems, specs, plans."""
