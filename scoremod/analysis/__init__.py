"""What can be proved about an expression before it runs."""
