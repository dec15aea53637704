"""Cache writes: where they go, the checks of the addresses, and the write itself."""
