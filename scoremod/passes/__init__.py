"""From expressions to expressions: simplify, fold, differentiate."""
