"""The templates of sums over ranks."""
