"""What megasoftmax.softmax must compute, in float64 and without any of its code."""
