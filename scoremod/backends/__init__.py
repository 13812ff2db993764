"""The backends: how each spells an operation, and how its text becomes something to call."""
