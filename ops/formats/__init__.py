"""Data layouts that ops share: paged caches, quantised weights and activations."""
