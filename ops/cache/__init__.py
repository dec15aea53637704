"""Where a cache write goes: addresses, their checks, the write itself."""
