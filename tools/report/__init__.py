"""Reports as people read them: for a terminal, and as a page with drawings."""
