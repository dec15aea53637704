"""Shows the time of a step of a model, as modelled and as a profile measures it."""
