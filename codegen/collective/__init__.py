"""Sums over ranks, with what follows them: problems, specs, plans."""
