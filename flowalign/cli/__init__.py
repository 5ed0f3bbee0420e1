"""Command line: one module per command, which defines its options."""
