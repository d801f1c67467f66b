"""The public functions: one operation a file, and what the operations share."""
