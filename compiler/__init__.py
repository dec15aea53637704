"""From a Dynamo graph to a graph with fused ops, and the backend that does it."""
