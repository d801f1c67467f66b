"""Several devices: DTensors, a vocabulary over ranks, a sequence over ranks in a ring."""
