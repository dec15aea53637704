"""The time of a model's step: as modelled, and as a profile measures it."""
