"""The templates of grouped GEMMs and of their quantisers."""
