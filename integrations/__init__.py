"""Adapters that put megasoftmax into other libraries: each imports what it adapts, no more."""
