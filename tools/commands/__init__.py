"""One file per command of `tilewright`."""
