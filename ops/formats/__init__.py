"""Data layouts that ops share: paged caches and, later, quantised formats."""
