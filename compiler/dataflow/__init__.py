"""Reads a Dynamo graph as dataflow: the operation of each node, and the memory that the node reads
and writes."""
