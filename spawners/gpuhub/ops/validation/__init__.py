"""`gpuhub validate`: uses a running cluster as one of its users does, measures it, and reports what does not hold."""
