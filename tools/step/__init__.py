"""Shows the time of a step of a model, both the modelled time and the time that a profile
measures."""
