"""The typed intermediate representation: one immutable node, and a table of operations."""
