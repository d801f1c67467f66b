"""The comparison with the oracle notices planted faults."""
