"""Contains the commands of `tilewright`. Each command has a file."""
