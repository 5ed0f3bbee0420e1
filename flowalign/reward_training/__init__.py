"""Training reward models, and measuring how well scores agree with people."""
