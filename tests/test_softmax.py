"""megasoftmax.softmax against the oracle."""
