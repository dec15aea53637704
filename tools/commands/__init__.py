"""The commands of `tilewright`. Each command has a file."""
