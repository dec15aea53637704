"""A Dynamo graph read as dataflow: what each node is, which memory it reads and writes."""
