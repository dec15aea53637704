"""Reads a Dynamo graph as dataflow: the operation of each node, and the memory it reads and
writes."""
